"""The course. `lessons/README.md` is the syllabus; `make lessons` makes the notebooks out of the scripts here."""
