// The form of a job, made from the schema of JobSpec, and the job as YAML. Pure functions: tests run them without a browser.

const PLAIN = /^[A-Za-z_][\w .\/@+-]*$/, RESERVED = /^(true|false|null|yes|no|on|off|y|n|~)$/i;

/** A number as YAML reads it: in `1e-7` it needs a point. */
const numeral = (value) => JSON.stringify(value).replace(/^(-?\d+)e/, "$1.0e");

/** A value on one line, in the syntax that YAML shares with JSON. */
function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(",")}]`;
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map(([name, inner]) => `${JSON.stringify(name)}:${flow(inner)}`).join(",")}}`;
  return typeof value === "number" ? numeral(value) : JSON.stringify(value);
}

function scalar(value) {
  if (typeof value !== "string") return flow(value);
  return PLAIN.test(value) && !RESERVED.test(value) && value === value.trim() && !/[:#]/.test(value) ? value : JSON.stringify(value);
}

/** A value of JSON as YAML: blocks for what is long, one line for what is short. */
export function toYaml(value, indent = 0) {
  const pad = " ".repeat(indent);
  const short = (inner) => inner === null || typeof inner !== "object" || Object.keys(inner).length === 0;
  if (short(value)) return `${pad}${value !== null && typeof value === "object" ? (Array.isArray(value) ? "[]" : "{}") : scalar(value)}\n`;
  if (Array.isArray(value)) return value.map((inner) => (short(inner) ? `${pad}- ${toYaml(inner).trim()}\n` : `${pad}- ${flow(inner)}\n`)).join("");
  return Object.entries(value).map(([name, inner]) => (short(inner) ? `${pad}${scalar(name)}: ${toYaml(inner).trim()}\n` : `${pad}${scalar(name)}:\n${toYaml(inner, indent + 2)}`)).join("");
}

/** The value at a path of an object, and a copy of it with another one; undefined removes the field and objects left empty. */
export const at = (spec, path) => path.reduce((value, name) => value?.[name], spec);
export function set(spec, [name, ...rest], value) {
  const copy = { ...spec };
  const inner = rest.length ? set(copy[name] ?? {}, rest, value) : value;
  if (inner === undefined || (rest.length && Object.keys(inner).length === 0)) delete copy[name];
  else copy[name] = inner;
  return copy;
}

/** The fields of a schema, in order: {name, path, kind: "text"|"number"|"integer"|"boolean"|"choice"|"object"|"json", ...}. */
export function fieldsOf(document, schema, path = []) {
  const resolve = (one) => (one.$ref ? { ...resolve(document.$defs?.[one.$ref.split("/").pop()] ?? document.schemas?.[one.$ref.split("/").pop()] ?? {}), ...without(one, "$ref") } : one);
  return Object.entries(resolve(schema).properties ?? {}).map(([name, given]) => {
    const options = (given.anyOf ?? given.oneOf ?? [given]).map(resolve).filter((one) => one.type !== "null");
    const field = { ...resolve(given), ...options[0], default: given.default, description: given.description ?? options[0]?.description ?? "" };
    const about = { name, path: [...path, name], description: plain(field.description), default: field.default, minimum: field.minimum, maximum: field.maximum };
    if (field.enum) return { ...about, kind: "choice", choices: field.enum };
    if (field.type === "object" || field.properties) return field.properties ? { ...about, kind: "object", fields: fieldsOf(document, field, about.path) } : { ...about, kind: "json" };
    if (options.length > 1 || field.type === "array") return { ...about, kind: "json" };
    return { ...about, kind: { string: "text", number: "number", integer: "integer", boolean: "boolean" }[field.type] ?? "json" };
  });
}

const without = (object, name) => Object.fromEntries(Object.entries(object).filter(([one]) => one !== name));

/** A description without the links and quotes of its markup. */
export const plain = (text) => (text ?? "").replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/`/g, "").replace(/\s+/g, " ").trim();

/** The first sentence of a description, for the form, without the name of what it links to; the rest is its title. */
export const brief = (text) => text.match(/^.*?[.;](?= |$)/)?.[0].replace(/;$/, ".").replace(/: [\w ]{1,20}\.$/, ".") ?? text;

/** What a text in a field means; undefined where it is empty. Raises for JSON that is none. */
export function parseField(kind, text) {
  if (text.trim() === "") return undefined;
  if (kind === "integer" || kind === "number") return Number(text);
  return kind === "json" ? JSON.parse(text) : text;
}

/** A job to begin with, and one like another, perhaps from its newest version. */
export const EXAMPLE = {
  name: "sums", base_model: "smollm2-135m-instruct",
  environment: { id: "jsonl", verifier: "exact", rows: [{ prompt: "2 + 2 = ? Number only.", answer: "4" }, { prompt: "3 + 5 = ? Number only.", answer: "8" }] },
  algorithm: { group_size: 8, groups_per_step: 4 }, sampling: { max_tokens: 16 }, stop: { steps: 20 },
};

const withoutNulls = (value) => (value === null || typeof value !== "object" || Array.isArray(value) ? value : Object.fromEntries(Object.entries(value).filter(([, inner]) => inner !== null).map(([name, inner]) => [name, withoutNulls(inner)])));

/** The names of the policies of a job that train, in the job's order. */
export const trained = (spec) => Object.entries(spec.policies).filter(([, policy]) => policy.train !== false).map(([name]) => name);

/** The fields of a job with whole numbers from 2^53 to 2^63, such as seeds, whose last digits a browser loses. */
export const inexact = (value, path = "") => (value === null || typeof value !== "object" ? (Number.isInteger(value) && !Number.isSafeInteger(value) && Math.abs(value) <= 2 ** 63 ? [path] : [])
  : Object.entries(value).flatMap(([name, inner]) => inexact(inner, path ? `${path}.${name}` : name)));

/** The names of a job's policies in the order of their colors: those that train have lines in the charts, the others follow. */
export const colored = (spec) => [...new Set([...trained(spec), ...Object.keys(spec.policies)])];

/** A job with all settings of another. With a `version`, its first trained policy starts from that version, and its other trained ones from their newest. */
export function likeJob(view, version) {
  const spec = withoutNulls(view.spec), { policies } = spec;
  if (version === undefined) return spec;
  const names = trained(view.spec);
  const start = (policy) => ({ job: view.id, policy, ...(policy === names[0] ? { version } : {}) });
  return { ...spec, name: `${spec.name}-more`, policies: Object.fromEntries(Object.entries(policies).map(([name, policy]) => [name, names.includes(name) ? { ...policy, warm_start: start(name) } : policy])) };
}
