package release

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
)

var withPrograms = flag.Bool("publish", false, "build a release with cosign, syft and helm, and publish it in a registry (make test-release)")

// version is the version of the release that the test makes.
const version = "v0.1.0"

// workshop is a clone of the repository in which releases are made.
type workshop struct {
	dir, registry string
	// key and otherKey are the names of two pairs of keys of cosign, without extension.
	key, otherKey string
	// cosign, helm and registryProgram are paths of programs.
	cosign, helm, registryProgram string
}

// TestRelease makes a release of the files in the worktree, publishes it in a registry on this machine, and
// verifies what users get from there.
func TestRelease(t *testing.T) {
	if !*withPrograms {
		t.Skip("make test-release runs this test, because it builds cosign, syft and a registry, which takes minutes")
	}
	testenv.Require(t, "network")
	w := newWorkshop(t)
	t.Run("refusals", w.testRefusals)
	if out, err := w.run("make", "release", "VERSION="+version); err != nil {
		t.Fatalf("make release: %v\n%s", err, out)
	}
	t.Run("files", w.testFiles)
	t.Run("signatures", w.testSignatures)
	t.Run("again", w.testAgain)
	w.startRegistry(t)
	out, err := w.run("make", "publish", "VERSION="+version)
	if err != nil {
		t.Fatalf("make publish: %v\n%s", err, out)
	}
	t.Run("image", w.testImage)
	t.Run("chart", w.testChart)
}

func newWorkshop(t *testing.T) *workshop {
	w := &workshop{dir: t.TempDir()}
	keys := t.TempDir()
	w.key, w.otherKey = filepath.Join(keys, "release"), filepath.Join(keys, "other")
	tool := func(modfile, name string) string {
		cmd := exec.Command("go", "tool", "-modfile="+modfile, "-n", name)
		cmd.Dir, cmd.Env, cmd.Stderr = root, os.Environ(), os.Stderr
		if modfile != "tools/go.mod" {
			cmd.Env = append(cmd.Env, "CGO_ENABLED=0") // as in release/tools.sh
		}
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	w.helm, w.cosign, w.registryProgram = tool("tools/go.mod", "helm"), tool("release/tools/go.mod", "cosign"), tool("release/tools/go.mod", "registry")
	for _, key := range []string{w.key, w.otherKey} {
		w.mustRun(t, w.cosign, "generate-key-pair", "--output-key-prefix", key)
	}

	// The files of the worktree, including changes that are not committed.
	testenv.Run(t, "bash", "-c", `cd "$1" && git ls-files -z -co --exclude-standard | while IFS= read -r -d "" f; do [ ! -f "$f" ] || printf "%s\0" "$f"; done | xargs -0 cp --parents -t "$2"`, "bash", root, w.dir)
	changelog := filepath.Join(w.dir, "CHANGELOG.md")
	data, err := os.ReadFile(changelog)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(data), "\n## ", "\n## Unreleased\n## "+version+" (2026-01-02)\nThe notes: [a](docs/releasing.md#verify-a-release), [c](https://example.com/c).\n\n## v0.0.9\n## Old ", 1)
	if err := os.WriteFile(changelog, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w.mustRun(t, "git", "init", "--quiet")
	w.mustRun(t, "git", "add", "--all")
	w.mustRun(t, "git", "-c", "user.name=Test", "-c", "user.email=test@example.com", "commit", "--quiet", "--message=Test")
	return w
}

// run runs a command in the clone, with the key of the release.
func (w *workshop) run(words ...string) (string, error) {
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Dir = w.dir
	cmd.Env = append(os.Environ(), "COSIGN_PASSWORD=secret", "COSIGN_KEY="+w.key+".key", "REGISTRY="+w.registry, "DOCKER_CONFIG="+w.dir+"/.docker")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (w *workshop) mustRun(t *testing.T, words ...string) string {
	t.Helper()
	out, err := w.run(words...)
	if err != nil {
		t.Fatalf("%q: %v\n%s", words, err, out)
	}
	return out
}

// wantFailure fails the test if a command succeeds, or its output does not contain a text.
func (w *workshop) wantFailure(t *testing.T, text string, words ...string) {
	t.Helper()
	if out, err := w.run(words...); err == nil || !strings.Contains(out, text) {
		t.Errorf("%q: got %v and %q, want a failure with %q", words, err, out, text)
	}
}

func (w *workshop) dist(name string) string { return filepath.Join(w.dir, "dist", name) }

func (w *workshop) read(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(w.dist(name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func (w *workshop) testRefusals(t *testing.T) {
	w.wantFailure(t, "must be like v1.2.3", "make", "release", "VERSION=0.1")
	w.wantFailure(t, "must be like v1.2.3", "make", "release")
	w.wantFailure(t, "no section", "make", "release", "VERSION=v9.9.9")
	w.wantFailure(t, "no section", "make", "release", "VERSION=v0.0.9") // an empty section
	w.wantFailure(t, "COSIGN_KEY", "env", "COSIGN_KEY=", "make", "release", "VERSION="+version)
	w.wantFailure(t, "make release", "make", "publish", "VERSION="+version) // there is no dist
	extra := filepath.Join(w.dir, "extra")
	if err := os.WriteFile(extra, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.wantFailure(t, "worktree has changes", "make", "release", "VERSION="+version)
	if err := os.Remove(extra); err != nil {
		t.Fatal(err)
	}
}

// testFiles checks the content of the release.
func (w *workshop) testFiles(t *testing.T) {
	const notes = "The notes: [a](https://github.com/trivet-csi/trivet/blob/" + version + "/docs/releasing.md#verify-a-release), [c](https://example.com/c)."
	if got := strings.TrimSpace(string(w.read(t, "notes.md"))); got != notes {
		t.Errorf("got the notes %q, want those of the section of CHANGELOG.md with absolute links: %q", got, notes)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		compressed, err := gzip.NewReader(bytes.NewReader(w.read(t, "trivet-"+version+"-linux-"+arch+".tar.gz")))
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]file{}
		for _, f := range readTar(t, compressed) {
			found[f.Name] = f
		}
		if !bytes.Equal(found["./trivet"].data, w.read(t, "trivet-linux-"+arch)) || found["./trivet"].Mode&0o111 != 0o111 || found["./LICENSE"].Typeflag != tar.TypeReg {
			t.Errorf("the archive for %s does not contain the program and LICENSE", arch)
		}
		for name, f := range found { // krew can unpack only these
			if f.Typeflag != tar.TypeReg && f.Typeflag != tar.TypeDir {
				t.Errorf("the archive for %s contains %s of type %q, want only files and directories", arch, name, f.Typeflag)
			}
		}
		sum := fmt.Sprintf("sha256: %x\n", sha256.Sum256(w.read(t, "trivet-"+version+"-linux-"+arch+".tar.gz")))
		if krew := string(w.read(t, "krew.yaml")); !strings.Contains(krew, "linux-"+arch+".tar.gz\n    "+sum) {
			t.Errorf("krew.yaml lacks the archive for %s with %s:\n%s", arch, sum, krew)
		}
		for _, name := range []string{"./man/trivet.8", "./completion/trivet.bash", "./completion/trivet.zsh", "./completion/trivet.fish"} {
			if found[name].Size == 0 {
				t.Errorf("the archive for %s has no %s", arch, name)
			}
		}
		w.checkSBOM(t, "trivet-linux-"+arch+".spdx.json", "github.com/container-storage-interface/spec")
		w.checkSBOM(t, "trivet-"+version+"-image-linux-"+arch+".spdx.json", "github.com/container-storage-interface/spec", "libc6", "xfsprogs", "arch="+arch)
	}
	commit := strings.TrimSpace(w.mustRun(t, "git", "rev-parse", "HEAD"))
	if out := w.mustRun(t, w.dist("trivet-linux-"+runtime.GOARCH), "version", "-o", "json"); !strings.Contains(out, `"`+version+`"`) || !strings.Contains(out, commit) || !strings.Contains(out, `"modified": false`) {
		t.Errorf("trivet version prints %q, want %s and the commit %s", out, version, commit)
	}
	if out := w.mustRun(t, w.helm, "show", "chart", w.dist("trivet-0.1.0.tgz")); !strings.Contains(out, "\nversion: 0.1.0\n") || !strings.Contains(out, "appVersion: 0.1.0\n") {
		t.Errorf("got the chart %s, want the version and appVersion 0.1.0", out)
	}
	digest := readArchive(t, w.dist("trivet-"+version+"-image.tar")).index(t)[0].Digest
	if want := "trivet:" + version + "@" + digest; !bytes.Contains(w.read(t, "trivet.yaml"), []byte(want)) {
		t.Errorf("trivet.yaml does not contain the image %s", want)
	}
}

// checkSBOM checks that an SBOM is an SPDX document that contains texts.
func (w *workshop) checkSBOM(t *testing.T, name string, texts ...string) {
	var document struct {
		Version string `json:"spdxVersion"`
	}
	data := w.read(t, name)
	if err := json.Unmarshal(data, &document); err != nil || !strings.HasPrefix(document.Version, "SPDX-2") {
		t.Errorf("%s: %v, got the version %q, want SPDX-2", name, err, document.Version)
	}
	for _, text := range texts {
		if !bytes.Contains(data, []byte(text)) {
			t.Errorf("%s does not contain %s", name, text)
		}
	}
}

// testSignatures checks that the signatures cover all files, and that nothing else verifies.
func (w *workshop) testSignatures(t *testing.T) {
	const ignore = "--insecure-ignore-tlog" // signatures with a key need no transparency log
	w.mustRun(t, "sh", "-c", "cd dist && sha256sum --quiet -c SHA256SUMS")
	sums := w.dist("SHA256SUMS")
	w.mustRun(t, w.cosign, "verify-blob", ignore, "--key", w.dist("cosign.pub"), "--bundle", sums+".sigstore.json", sums)
	w.wantFailure(t, "", w.cosign, "verify-blob", ignore, "--key", w.otherKey+".pub", "--bundle", sums+".sigstore.json", sums)
	verify := []string{w.cosign, "verify-blob-attestation", ignore, "--key", w.dist("cosign.pub"), "--type", "slsaprovenance1", "--bundle", w.dist("provenance.sigstore.json")}
	w.wantFailure(t, "", append(verify, sums)...) // not a subject

	listed := strings.Fields(string(w.read(t, "SHA256SUMS")))
	entries, err := os.ReadDir(w.dist("."))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		switch name := e.Name(); name {
		case "SHA256SUMS", "SHA256SUMS.sigstore.json", "cosign.pub":
		case "provenance.intoto.json", "provenance.sigstore.json":
			if !slices.Contains(listed, name) {
				t.Errorf("SHA256SUMS lacks %s", name)
			}
		default:
			if !slices.Contains(listed, name) {
				t.Errorf("SHA256SUMS lacks %s", name)
			}
			w.mustRun(t, append(verify, w.dist(name))...)
		}
	}

	commit := strings.TrimSpace(w.mustRun(t, "git", "rev-parse", "HEAD"))
	for _, want := range []string{`"gitCommit": "` + commit + `"`, "https://deb.debian.org/debian/pool/main/x/xfsprogs/", `"builder"`} {
		if !bytes.Contains(w.read(t, "provenance.intoto.json"), []byte(want)) {
			t.Errorf("the provenance statement lacks %s", want)
		}
	}
}

// testAgain makes the release again, and compares all files except the signatures.
func (w *workshop) testAgain(t *testing.T) {
	sums := func() string {
		var lines []string
		for line := range strings.Lines(string(w.read(t, "SHA256SUMS"))) {
			if !strings.Contains(line, "sigstore") {
				lines = append(lines, line)
			}
		}
		return strings.Join(lines, "")
	}
	before := sums()
	w.mustRun(t, "make", "release", "VERSION="+version)
	if after := sums(); after != before {
		t.Errorf("got the files\n%s\nfrom the second build, want those of the first\n%s", after, before)
	}
}

// startRegistry starts a registry on this machine until the test ends.
func (w *workshop) startRegistry(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "registry.yaml")
	text := fmt.Sprintf("version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\nstorage: {filesystem: {rootdirectory: %s}}\nhttp: {addr: %s}\n", t.TempDir(), address)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(w.registryProgram, "serve", config)
	cmd.Env = append(os.Environ(), "OTEL_TRACES_EXPORTER=none")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the registry wrote:\n%s", log.String())
		}
	})
	w.registry = address + "/trivet-csi"
	err = retry.For(t.Context(), time.Minute, func() (bool, error) {
		connection, err := net.Dial("tcp", address)
		if err != nil {
			return true, err
		}
		return false, connection.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// get returns the body of a path below /v2/trivet-csi/ in the registry, and its digest.
func (w *workshop) get(t *testing.T, path string) (body []byte, digest string) {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet, "http://"+strings.Replace(w.registry, "/", "/v2/", 1)+"/"+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Accept", "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err = io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v, %s: %s", path, err, response.Status, body)
	}
	return body, response.Header.Get("Docker-Content-Digest")
}

// testImage checks that the registry has the image of the release, with its signatures and attestations.
func (w *workshop) testImage(t *testing.T) {
	body, digest := w.get(t, "trivet/manifests/"+version)
	if want := readArchive(t, w.dist("trivet-"+version+"-image.tar")).index(t)[0].Digest; digest != want {
		t.Errorf("the registry has the image %s, want %s", digest, want)
	}
	var index manifest
	if err := json.Unmarshal(body, &index); err != nil || len(index.Manifests) != 2 {
		t.Fatalf("%v: got the index %s, want two images", err, body)
	}
	w.checkSigned(t, w.registry+"/trivet:"+version)
	w.mustRun(t, w.cosign, "verify-attestation", "--insecure-ignore-tlog", "--key", w.dist("cosign.pub"), "--type", "slsaprovenance1", w.registry+"/trivet:"+version)
	for _, image := range index.Manifests {
		reference := w.registry + "/trivet@" + image.Digest
		w.checkSigned(t, reference)
		w.mustRun(t, w.cosign, "verify-attestation", "--insecure-ignore-tlog", "--key", w.dist("cosign.pub"), "--type", "spdxjson", reference)
	}
}

// checkSigned checks that the key of the release verifies a reference, and another key does not.
func (w *workshop) checkSigned(t *testing.T, reference string) {
	t.Helper()
	w.mustRun(t, w.cosign, "verify", "--insecure-ignore-tlog", "--key", w.dist("cosign.pub"), reference)
	w.wantFailure(t, "", w.cosign, "verify", "--insecure-ignore-tlog", "--key", w.otherKey+".pub", reference)
}

// testChart checks that helm gets the chart of the release from the registry.
func (w *workshop) testChart(t *testing.T) {
	_, digest := w.get(t, "charts/trivet/manifests/0.1.0")
	w.checkSigned(t, w.registry+"/charts/trivet@"+digest)
	dir := t.TempDir()
	w.mustRun(t, w.helm, "pull", "oci://"+w.registry+"/charts/trivet", "--version", "0.1.0", "--plain-http", "--destination", dir)
	got, err := os.ReadFile(filepath.Join(dir, "trivet-0.1.0.tgz"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, w.read(t, "trivet-0.1.0.tgz")) {
		t.Error("helm pulled another chart than that of the release")
	}
}
