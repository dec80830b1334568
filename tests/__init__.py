"""Laws and unit tests that need no report: one folder for each package."""
