"""Which settings: candidates, trials, rules, and the choice that is remembered."""
