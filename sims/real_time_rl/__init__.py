"""Real-time RL: users of a served policy react, their reactions become rewards, and a better policy is shipped.

users.py       what a user sees of a session, and how they react to it: a stated model
world.py       the small world with a call that asks the user, and tasks that leave open what is wanted
rewards.py     what the loop makes of a reaction: two careless ways, each with its cure
loop.py        serve, collect, train, look at held-out tasks, ship; again
experiment.py  the experiment: etude figure real-time-rl
verdicts.py    its claims and its picture
"""
