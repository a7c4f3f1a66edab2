"""Books as sentence triples, and tasks for sentence vectors."""
