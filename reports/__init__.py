"""How it is shown: tables and the HTML page, from records alone."""
