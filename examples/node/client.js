// Stream a completion: node client.js ADDRESS PROMPT. Knows the service from proto/ alone.
import { credentials, loadPackageDefinition } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("../../proto", import.meta.url));
const definition = loadSync("specwire/v1/generation.proto", { includeDirs: [root], keepCase: true, defaults: true, longs: Number });
const { GenerationService } = loadPackageDefinition(definition).specwire.v1;

const [address, prompt] = process.argv.slice(2);
if (!address || prompt === undefined) {
  console.error("usage: node client.js ADDRESS PROMPT");
  process.exit(2);
}
const service = new GenerationService(address, credentials.createInsecure());
const call = service.Generate(
  { text: prompt, stopping: { max_tokens: 60 } },
  { deadline: Date.now() + 60_000 },
);
call.on("data", ({ chunk, finished }) => {
  if (chunk) process.stdout.write(chunk.text);
  if (finished) console.log(finished.text);
});
call.on("error", ({ code, details }) => {
  console.error(`status ${code}: ${details}`);
  process.exitCode = 1;
});
call.on("end", () => service.close());
