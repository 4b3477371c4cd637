"""Programs of the grading sandbox: the one that judges, and the one that plays tests. They stand alone there, without
the rest of the project."""
