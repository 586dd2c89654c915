"""The screen of `launch top`, and the page that a run leaves behind."""
