const assert = require("node:assert");
const test = require("node:test");
const { total } = require("./cart.js");

test("prices are rounded after they are added", () => {
  assert.strictEqual(total([1.4, 1.4]), 2.8);
});
