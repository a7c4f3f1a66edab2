"""Ways to run the time steps of recurrent layers, and what they have in common."""
