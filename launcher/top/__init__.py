"""The screen of `launch top`, and the HTML report of a finished run."""
