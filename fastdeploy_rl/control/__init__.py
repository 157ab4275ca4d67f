"""How an engine is commanded from outside: the controller, its HTTP form, and the OpenAI-compatible front end."""
