"""Mutation tests: each small wrong change to a source file must fail at least one test.

mutmut and cosmic-ray do not fit. Both change files inside the working tree, and neither has mutations of ``detach``, masks or
bounds. cosmic-ray also imports torch anew for each of thousands of changes.
"""
