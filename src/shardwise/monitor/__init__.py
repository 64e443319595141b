"""Looking at a run while it goes on or after: its files folded into one view, a terminal and a page that show it."""
