// Compile the contracts with fixed settings and write ABI and bytecode; `--check` compares instead of writing.
// Needs `make contracts`. Reads files below this folder only.
import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";

const solc = createRequire(import.meta.url)("solc");
const here = dirname(fileURLToPath(import.meta.url));
const names = ["Distributor", "TestToken"];
const settings = {
  optimizer: { enabled: true, runs: 1000000 },
  viaIR: true,
  evmVersion: "cancun",
  metadata: { bytecodeHash: "ipfs" },
  outputSelection: { "*": { "*": ["abi", "evm.bytecode.object", "evm.deployedBytecode.object"] } },
};

function compiled() {
  const sources = Object.fromEntries(
    names.map((name) => [`${name}.sol`, { content: readFileSync(join(here, `${name}.sol`), "utf8") }]),
  );
  const input = { language: "Solidity", sources, settings };
  const load = (path) => {
    if (!path.startsWith("@openzeppelin/contracts/")) return { error: `unexpected import: ${path}` };
    return { contents: readFileSync(join(here, "node_modules", path), "utf8") };
  };
  const output = JSON.parse(solc.compile(JSON.stringify(input), { import: load }));
  for (const each of output.errors ?? []) {
    process.stderr.write(each.formattedMessage);
  }
  if (output.errors?.length) process.exit(1);
  return output.contracts;
}

function artifact(name, contract) {
  const { outputSelection, ...kept } = settings;
  return {
    contract: name,
    compiler: solc.version(),
    openzeppelin: JSON.parse(readFileSync(join(here, "node_modules/@openzeppelin/contracts/package.json"), "utf8")).version,
    settings: kept,
    abi: contract.abi,
    bytecode: "0x" + contract.evm.bytecode.object,
    deployedBytecode: "0x" + contract.evm.deployedBytecode.object,
  };
}

const contracts = compiled();
let differ = false;
for (const name of names) {
  const text = JSON.stringify(artifact(name, contracts[`${name}.sol`][name]), null, 1) + "\n";
  const path = join(here, `${name}.json`);
  if (!process.argv.includes("--check")) {
    writeFileSync(path, text);
  } else if (readFileSync(path, "utf8") !== text) {
    process.stderr.write(`${name}.json is not what ${name}.sol compiles to; run: npm run build --prefix contracts\n`);
    differ = true;
  }
}
process.exit(differ ? 1 : 0);
