// The service's clock. Its moments are compared with it, as the reader's own clock may be wrong by hours.

const EXACT = 2; // seconds: the header has whole ones, and some time passes until it is read
let ahead = 0;

/** Notes the `Date` header of a response; `own` is the reader's clock in Unix seconds. */
export function heard(date, own = Date.now() / 1000) {
  const seconds = Date.parse(date ?? "") / 1000 - own;
  if (Number.isFinite(seconds)) ahead = Math.abs(seconds) > EXACT ? seconds : 0;
}

/** Unix seconds by the service's clock; without an answer of it, by the reader's. */
export const now = () => Date.now() / 1000 + ahead;
