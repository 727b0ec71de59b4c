// What Node's modules for files return for a tree. The argument is the tree.
'use strict';
const child = require('child_process');
const fs = require('fs');
const os = require('os');
const path = require('path');

const root = process.argv[2];
const at = (name) => path.join(root, name);
const attempt = (call) => {
  try {
    return call();
  } catch (error) {
    return error.code;
  }
};

async function main() {
  console.log(require(at('module.js')).answer, require(at('folder')).name);
  const { size, mode, mtimeMs } = fs.statSync(at('words'));
  console.log(size, mode, mtimeMs, fs.lstatSync(at('link')).isSymbolicLink(), fs.readlinkSync(at('link')));
  console.log(fs.realpathSync(at('link')), fs.realpathSync.native(at('link')), fs.existsSync(at('nothing')));
  console.log(fs.readdirSync(root).sort());
  const copy = path.join(fs.mkdtempSync(path.join(os.tmpdir(), 'node')), 'copy');
  fs.copyFileSync(at('big'), copy);
  console.log(fs.readFileSync(copy).equals(fs.readFileSync(at('big'))), fs.statSync(copy).size);
  fs.rmSync(path.dirname(copy), { recursive: true });
  // The thread pool, with many files at a time.
  const all = await Promise.all([...Array(200)].map(() => fs.promises.readFile(at('words'), 'utf8')));
  console.log(all.length, new Set(all).size, await fs.promises.stat(at('big')).then((stat) => stat.size));
  let total = 0;
  for await (const part of fs.createReadStream(at('big'))) total += part.length;
  console.log(total, attempt(() => fs.openSync(at('nothing'))), attempt(() => fs.readdirSync(at('words'))));
  const file = fs.openSync(at('words'), 'r');
  const words = child.spawnSync('cat', [], { stdio: [file, 'pipe', 'inherit'] });
  fs.closeSync(file);
  console.log(words.status, String(words.stdout), String(child.execFileSync('head', ['-c', '4', at('words')])));
}

main();
