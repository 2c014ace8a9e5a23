"""The HTML page that shows runs: one file that needs no server and sends no requests."""
