"""What `launch top` shows of a run, and the page that a run leaves behind."""
