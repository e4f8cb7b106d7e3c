"""Documents: blocks of text, tables and charts, on the terminal and as HTML."""
