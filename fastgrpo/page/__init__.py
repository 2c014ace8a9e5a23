"""The page that shows runs in a browser: one file of HTML that needs no server and asks the network for nothing."""
