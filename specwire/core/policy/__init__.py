"""How much is drafted and tested, and when. It may change how fast a text comes, never the text."""
