"""The plan as data: a graph, its steps, their canonical form and digest. No rule about what is planned lives here."""
