"""A command as a batch job of Slurm's: its script, its submission, what runs inside it, and how it is followed.

A command with a profile of kind ``slurm`` gets here by `place`. The job itself is `keeper`, on its first node,
which starts a scheduler, by ``srun`` one `launcher` for each task, and the command once more, `inside` the job.
Terminal and job meet in the files of a `folder.JobFolder` alone. Nothing here knows a tile or a text.
"""

INSIDE = "TILEWRIGHT_JOB_PROFILES"
"""In the environment of a job's command: the file with the profile of the job's own cluster."""
