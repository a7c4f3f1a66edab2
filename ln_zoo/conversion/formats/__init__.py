"""State dicts and call signatures of recurrent layers of other libraries."""
