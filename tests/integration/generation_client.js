// A client of GenerationService by grpc-js and proto-loader, from proto/ alone: node generation_client.js ADDRESS.
// Prints what it saw of each way to leave a session and come back, as one JSON object.
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const require = createRequire(new URL("../../examples/node/client.js", import.meta.url));
const { credentials, loadPackageDefinition } = require("@grpc/grpc-js");
const { loadSync } = require("@grpc/proto-loader");

const root = fileURLToPath(new URL("../../proto", import.meta.url));
const options = { includeDirs: [root], keepCase: true, defaults: true, oneofs: true, longs: String, enums: String };
const definition = loadSync("specwire/v1/generation.proto", options);
const { GenerationService } = loadPackageDefinition(definition).specwire.v1;
const service = new GenerationService(process.argv[2], credentials.createInsecure());

const MASK = (1n << 64n) - 1n;

// PROTOCOL.md, section 4.
function extended(hash, token) {
  let mixed = ((hash ^ (BigInt(token) + 1n)) + 0x9e3779b97f4a7c15n) & MASK;
  mixed = ((mixed ^ (mixed >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  mixed = ((mixed ^ (mixed >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return mixed ^ (mixed >> 31n);
}

// What a stream tells until its end. leave(call, seen) is called with each chunk.
function read(call, leave = () => {}) {
  const seen = { tokens: [], text: "" };
  return new Promise((resolve) => {
    call.on("data", ({ started, chunk, finished }) => {
      if (started) Object.assign(seen, { session_id: started.session_id, position: started.prompt_tokens, hash: BigInt(started.prompt_hash) });
      if (chunk) {
        seen.text += chunk.text;
        seen.tokens.push(...chunk.tokens);
        seen.position += chunk.tokens.length;
        seen.hash = chunk.tokens.reduce(extended, seen.hash);
        leave(call, seen);
      }
      if (finished) Object.assign(seen, { reason: finished.reason, text: seen.text + finished.text });
    });
    call.on("error", ({ code }) => resolve({ ...seen, code }));
    call.on("end", () => resolve({ ...seen, code: 0 }));
  });
}

const asked = (max_tokens, more = {}) => ({ text: "1 2 3", stopping: { max_tokens, ignore_eos: true }, ...more });
const unary = (name, request) =>
  new Promise((resolve) => service[name](request, (error, answer) => resolve(error ? { code: error.code } : answer)));

async function ended(session_id) {
  for (;;) {
    const found = await unary("GetSession", { session_id });
    if (found.code || found.finish_reason !== "FINISH_REASON_UNSPECIFIED") return found.code ?? found.finish_reason;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const whole = await read(service.Generate(asked(60)));

// Another call ends it; this stream says so.
let once = true;
const cancelled = await read(service.Generate(asked(4000)), (_, { session_id }) => {
  if (once) unary("Cancel", { session_id });
  once = false;
});

// The client goes; without a request id that is the session's end.
const left = await read(service.Generate(asked(4000)), (call) => call.cancel());
const late = await read(service.Generate(asked(4000), { deadline: Date.now() + 1500 }));

// With one it goes on, and Watch from the place that the client has reached.
const request_id = `grpc-js-${process.pid}`;
const broken = await read(service.Generate(asked(60, { request_id })), (call) => call.cancel());
const place = { session_id: broken.session_id, from_position: broken.position, prefix_hash: broken.hash.toString() };
const resumed = await read(service.Watch(place));
const repeated = await read(service.Generate(asked(60, { request_id })));
const other = await read(service.Watch({ ...place, prefix_hash: (broken.hash ^ 1n).toString() }));

console.log(
  JSON.stringify({
    whole: whole.text,
    reason: whole.reason,
    cancelled: [cancelled.code, cancelled.reason],
    left: [left.code, await ended(left.session_id)],
    late: [late.code, await ended(late.session_id)],
    broken: [broken.code, broken.tokens.length < 60],
    resumed: [resumed.code, [...broken.tokens, ...resumed.tokens].join() === whole.tokens.join(), broken.text + resumed.text],
    repeated: [repeated.session_id === broken.session_id, repeated.text],
    other: other.code,
    unknown: await ended("none"),
  }),
);
service.close();
