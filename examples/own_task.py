"""Your own task in Python: the model learns to add. It needs a running service: ``rookery serve``.

A worked example in the prompt shows the form of the reply, and a bare number earns a little even when it is wrong, so a
group has better and worse episodes from the first step. On two CPU cores it takes about two minutes; the mean reward on
held-out sums rises from 0.10 to 0.55 +/- 0.06, where the best constant reply earns 0.16.
"""

import rookery


class Adder(rookery.Environment):
    def prompts(self, split):  # "train" or "eval"; an iterable of anything JSON
        sums = [{"a": a, "b": b} for a in range(1, 20) for b in range(1, 20)]
        return [s for s in sums if ((3 * s["a"] + s["b"]) % 5 == 0) == (split == "eval")]

    async def reset(self, prompt, seed):  # the first messages
        example = [{"role": "user", "content": "2 + 3 ="}, {"role": "assistant", "content": "5"}]
        return [*example, {"role": "user", "content": f"{prompt['a']} + {prompt['b']} ="}]

    async def step(self, reply):  # reply.text, reply.tokens, reply.messages, reply.turn
        text = reply.text.strip()
        right = text == str(self.prompt["a"] + self.prompt["b"])
        return rookery.Step(reward=0.1 * text.isdigit() + 0.9 * right, done=True, metrics={"right": float(right)})


if __name__ == "__main__":
    job = rookery.Client().train(
        base_model="smollm2-135m-instruct",
        environment=Adder(),
        policies={"main": {"rank": 16, "optimizer": {"lr": 5e-4}}},
        algorithm={"group_size": 8, "groups_per_step": 6},
        sampling={"max_tokens": 8},
        evaluation={"prompts": 64},
        stop={"steps": 24},
    )
    for row in job.metrics():
        print(row.step, row.figure("reward"))
    for row in job.evaluations():  # figure() writes a dash for a number that there is not
        print(f"version {row.version}: {row.figure('mean')} +/- {row.figure('stderr')} on held-out sums")
    job.adapter().download("adder/")  # a PEFT folder
    example = [{"role": "user", "content": "2 + 3 ="}, {"role": "assistant", "content": "5"}]
    print(job.sample([*example, {"role": "user", "content": "7 + 8 ="}]).text)
