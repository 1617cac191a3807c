"""Chooses the settings of a phase: the candidates, their trials, and the rules that select the winner."""
