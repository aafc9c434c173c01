"""How good the tests are: mutants of the mathematical rooms, and coverage of the whole package."""
