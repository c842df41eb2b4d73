// The charts of a run: which there are, from which fields, and what they mean. Pure functions: tests run them without a browser.
import { duration, isNumber } from "./format.js";

const FIRST = "reward/"; // a metric of the environment is reward/<name>

/** The charts of a run, with a line for each of its policies, in their `order`, without those that have no value. `evaluations` and `constant` belong to the reward. */
export function chartsOf(rows, evaluations = [], order = []) {
  const policies = [...new Set(rows.map((row) => row.policy))].sort((a, b) => order.indexOf(a) - order.indexOf(b)), several = rows.some((row) => row.policy); // a row names its policy where several train
  const onRows = rows.length > 0 && rows.every((row) => isNumber(row.rows)); // a step on rows has no reward
  const of = (policy, name, factor = 1) => rows.map((row) => (row.policy === policy && isNumber(row[name]) ? factor * row[name] : null));
  const line = (label, name, more = {}) => policies.map((policy) => ({ label: several ? `${policy}: ${label}` : label, values: of(policy, name, more.factor), ...more }));
  const stages = [["queue", "seconds/queue"], ["generation", "seconds/generation"], ["environment", "seconds/environment"], ["waiting", "seconds/waiting"], ["training", "seconds/train"], ["commit", "seconds/commit"]];
  const metrics = [...new Set(rows.flatMap((row) => Object.keys(row).filter((name) => name.startsWith(FIRST))))].sort();
  const charts = [
    onRows ? { title: "Loss", unit: "mean of the step", about: "The mean negative log-probability of the learned tokens, or the loss of the pairs. It should fall. The dots are held-out rows.", lines: [line("training", "loss"), ...evaluationLines(rows, evaluations, several, order)] }
      : { title: "Reward", unit: "mean of the step", about: "It should rise, with noise, within 10 to 20 steps. The dots are means on held-out prompts; the dashed line is the reward of the best reply that is always the same.", lines: [line("training", "reward"), ...evaluationLines(rows, evaluations, several, order)] },
    ...(onRows ? [
      { title: "Preference", unit: "share of pairs", about: "How often the chosen reply has gained more probability than the rejected one. It should rise above a half.", lines: [line("chosen preferred", "accuracy")], most: 1 },
      { title: "Margin", unit: "implicit reward", about: "How much more the chosen reply has gained than the rejected one.", lines: [line("chosen − rejected", "margin")] },
    ] : []),
    onRows ? { title: "Row length", unit: "tokens", about: "Tokens of the step's rows, prompts included.", lines: [line("mean", "length_mean"), line("longest", "length_max")], digits: 1 }
      : { title: "Reply length", unit: "tokens", about: "Sampled tokens of an episode. Where the longest one is at sampling.max_tokens in most steps, replies are cut.", lines: [line("mean", "length_mean"), line("longest", "length_max")], digits: 1 },
    { title: "Entropy", unit: "nats per token", about: "How undecided the policy is about its next token. It should fall slowly; at 0 after a few steps every reply is the same.", lines: [line("entropy", "entropy")] },
    { title: "KL to the start", unit: "nats per token", about: "How far the policy has moved from the one that it began with.", lines: [line("KL", "kl")] },
    { title: "Log-prob gap", unit: "nats per token, mean of |trainer − engine|", about: "The difference between the trainer's and the engine's log-probabilities. At staleness 0 it is numerical error alone, below 0.06; above, it also holds what the policy has learned since it sampled.", lines: [line("mean", "logp_diff_mean")] },
    { title: "Groups without variance", unit: "% of groups", about: "Groups whose answers all earned the same: they teach nothing. Near 100 % the task is too hard, too easy, or needs partial credit.", lines: [line("share", "zero_variance_share", { factor: 100 })], digits: 0, most: 100 },
    { title: "Staleness", unit: "optimizer steps", about: "How many steps the policy had taken since it sampled what it trains on; at most algorithm.max_staleness.", lines: [line("mean", "staleness_mean"), line("oldest", "staleness_max")], digits: 2 },
    ...policies.map((policy) => ({ // each has six lines already
      title: several ? `Seconds by stage: ${policy}` : "Seconds by stage", unit: "s", show: duration, main: "generation",
      about: "Of a mean episode: the queue, generation, its environment. Of the step: waiting for complete groups, training, commit. The largest one is where the time goes.",
      lines: stages.map(([label, name]) => ({ label, values: of(policy, name) })),
    })),
    { title: "Gradient norm", unit: "L2, before clipping", about: "The size of the step's gradient. A sudden rise is a warning; optimizer.grad_clip bounds its effect.", lines: [line("norm", "grad_norm")] },
    ...metrics.map((name) => ({ title: name.slice(FIRST.length), unit: "metric of the environment", environment: true, lines: [line("mean", name)] })),
  ];
  return charts
    .map((chart) => ({ ...chart, lines: chart.lines.flat().filter((one) => one.values.some(isNumber)) }))
    .filter((chart) => chart.lines.length > 0 && (chart.title !== "KL to the start" || chart.lines.some((one) => one.values.some((value) => value))));
}

/** Evaluations by policy in the job's `order`, the newest version first. */
export const sortedEvaluations = (evaluations, order) => [...evaluations].sort((a, b) => order.indexOf(a.policy) - order.indexOf(b.policy) || b.version - a.version);

/** The charts of several runs on the same steps, those of a run's overview: [{title, unit, digits, show, lines}] with the first or main line of each policy of each run. Pure. */
export function compared(all, names) {
  const { runs, labels } = byPolicy(all, names);
  const steps = [...new Set(runs.flatMap((rows) => rows.map((row) => row.step)))].sort((a, b) => a - b), found = new Map();
  runs.forEach((rows, at) => {
    const places = new Map(rows.map((row, place) => [row.step, place]));
    for (const { lines, ...chart } of chartsOf(rows)) {
      const shown = lines.find((one) => one.label === chart.main) ?? lines[0];
      if (!found.has(chart.title)) found.set(chart.title, { ...chart, unit: lines.length > 1 ? `${chart.unit}, ${shown.label}` : chart.unit, lines: runs.map((_, place) => ({ label: labels[place], values: steps.map(() => null) })) });
      found.get(chart.title).lines[at].values = steps.map((step) => shown.values[places.get(step)] ?? null);
    }
  });
  return { steps, charts: [...found.values()] };
}

/** A run with several policies as one run for each of them, labelled with its name. */
function byPolicy(all, names) {
  const parts = all.flatMap((rows, at) => {
    const policies = [...new Set(rows.map((row) => row.policy))];
    return !rows.some((row) => row.policy) ? [{ rows, label: names[at] }] : policies.map((policy) => ({ rows: rows.filter((row) => row.policy === policy).map((row) => ({ ...row, policy: undefined })), label: `${names[at]}: ${policy}` }));
  });
  return { runs: parts.map((one) => one.rows), labels: parts.map((one) => one.label) };
}

function evaluationLines(rows, evaluations, several, order) {
  const policies = [...new Set(evaluations.map((one) => one.policy))].sort((a, b) => order.indexOf(a) - order.indexOf(b));
  const lines = policies.map((policy) => {
    const values = rows.map(() => null);
    for (const one of evaluations.filter((each) => each.policy === policy)) {
      // A version holds the steps up to the last row of its policy that carries it; version 0 is before the first.
      const at = rows.findLastIndex((row) => (!several || row.policy === policy) && row.version <= one.version);
      values[Math.max(0, at)] = one.loss ?? one.mean;
    }
    return { label: several ? `${policy}: held-out` : "held-out", values, dots: true, raw: true };
  });
  return [...lines, ...constantLines(rows, evaluations, policies)];
}

/** The reward of the best constant reply of each of the policies that has one. */
function constantLines(rows, evaluations, policies) {
  return policies.flatMap((policy) => {
    const best = evaluations.findLast((one) => one.policy === policy && one.constant)?.constant;
    const label = policies.length > 1 ? `${policy}: best constant reply` : "best constant reply";
    return best ? [{ label, values: rows.map(() => best.reward), dashed: true, raw: true }] : [];
  });
}
