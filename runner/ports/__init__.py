"""Protocols between the engine and the world. Mostly prose: the contract is here, adapters obey it."""
