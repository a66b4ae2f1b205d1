"""Do the tests notice when the code is wrong? Each small wrong change to a source file must fail at least one of them.

mutmut and cosmic-ray do not fit: both change files inside the working tree, neither knows of ``detach``, masks or bounds, and
cosmic-ray imports torch anew for each of thousands of changes.
"""
