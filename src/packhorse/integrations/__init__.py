"""Where Packhorse meets training libraries. Each module imports its library when it is used."""
