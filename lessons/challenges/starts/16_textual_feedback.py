"""Challenge 16: learn from hints, not from leaks.

A student writes words in many situations. Wherever it went wrong, the same student read a hint and said what it would
write instead: the teacher. In half of the situations one word is always right, and the hint names it, or another word
in one case of five. In the others the right word is different in each task, and the hint gave that one away: there is
nothing in it for other tasks.

weights(student, teacher): the student's and the teacher's distributions at each position, [positions, 12] each; return
a weight for each position, from 0 to 10. In each situation the student becomes the weighted mean of itself (weight 1)
and its teachers. A situation may come up to six times; its student is the same each time.

Score: the gain in log-probability of what is right on new tasks, over all situations, as a share of what a student
would gain that knows every habit and leaves the rest alone. More is better.
"""


def weights(student, teacher):
    """All hints alike."""
    return [1.0] * len(student)
