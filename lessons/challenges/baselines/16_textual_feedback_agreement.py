"""Groups positions by their student, and believes hints that name the same word again and again, less by chance the
rarer it was."""

import numpy as np

HABIT, CONFUSED = 0.5, 0.2


def weights(student, teacher):
    named = (teacher - student).argmax(1)
    values = np.zeros(len(student))
    groups = {}
    for at, row in enumerate(student):
        groups.setdefault(row.tobytes(), []).append(at)
    words = student.shape[1]
    for places in groups.values():
        p = student[places[0]]
        hinted_words = named[places]
        leak = (1 - CONFUSED) * p + CONFUSED / words
        prior = 0.5 * p + 0.5 / words
        likelihoods = np.array(
            [
                np.prod(np.where(hinted_words == word, 1 - CONFUSED + CONFUSED / words, CONFUSED / words))
                for word in range(words)
            ]
        )
        habits = HABIT * prior * likelihoods
        leaks = (1 - HABIT) * np.prod(leak[hinted_words])
        total = habits.sum() + leaks
        for at, word in zip(places, hinted_words):
            sure = max(float((teacher[at] - student[at]).sum(where=np.arange(words) == word)) / (1 - p[word]), 0.05)
            belief = min(habits[word] / total, 0.97)
            count = int((hinted_words == word).sum())
            values[at] = min(10.0, belief / (1 - belief) / count / sure * 0.5)
    return values
