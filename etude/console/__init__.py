"""What commands share: settings, expected durations, progress, and what to run next."""
