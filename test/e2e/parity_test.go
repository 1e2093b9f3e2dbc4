//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// difference is a documented difference between a pod under a kubelet and under the manager. name is its name
// in docs/volume-manager.md. The other fields are regular expressions for a path of the trees and for its
// whole descriptions. An empty expression means that the path is absent.
type difference struct{ name, path, kubelet, manager string }

// differences contains all allowed differences. The test fails if one does not occur.
var differences = []difference{
	{"Addresses of nodes", "expr-address/outcome", ready, refused},
	{"Annotations of the kubelet", inMemory + `/..DATE/annotations content`, `.*config.seen.*`, `.+`},
	// The kubelet creates volumes with mode 0755 if it mounts before it creates the pod's directories.
	{"Directories of plugins", `[^/]+/volumes(/kubernetes.io~(empty-dir|configmap|secret|downward-api|projected))?`, `040000 0755 0:0`, `040000 0750 0:0`},
	{"Directories of pods", `(host|claim-device)/volumes`, `040000 0750 0:0`, ``},
	{"Links to tokens", inMemory + `/token`, `0120000 0777 1000:.+`, `0120000 0777 0:.+`},
	{"Records of CSI volumes", `[^/]+/volumes/kubernetes.io~csi/[^/]+/vol_data.json`, `0100000 0644 0:0`, `0100000 0600 0:0`},
	{"Records of CSI volumes", `[^/]+/volumes/kubernetes.io~csi/[^/]+/vol_data.json content`, `.+`, `.+`},
	{"Resources of the machine", `payload-without-limits/volumes/kubernetes.io~downward-api/data/..DATE/(memory|storage) content`, `"\d+"`, `"\d+"`},
	{"Resources of the machine", `empty/volumes/kubernetes.io~empty-dir/memory size`, `\d+`, `\d+`},
	{"Service account tokens", inMemory + `/..DATE/token content`, `.+`, `.+`},
	{"Services", "expr-service/outcome", ready, refused},
	{"Size of volumes with projected content", inMemory + ` (size|inodes)`, `\d+`, `\d+`},
	{"Unused volumes", `unused/volumes/kubernetes.io~empty-dir(/data)?`, "", "040000 .*"},
}

// inMemory matches the volumes that are a tmpfs.
const inMemory = `[^/]+/volumes/kubernetes.io~(secret|downward-api|projected)/[^/]+`

// covers reports whether two descriptions of a path are a difference of this kind.
func (d difference) covers(path, kubelet, manager string) bool {
	return matchesWhole(d.path, path) && matchesWhole(d.kubelet, kubelet) && matchesWhole(d.manager, manager)
}

// matchesWhole reports whether an expression matches a whole text. A dot also matches a newline.
func matchesWhole(expression, text string) bool {
	return regexp.MustCompile("^(?s:" + expression + ")$").MatchString(text)
}

// TestParity gives the same manifests to a kubelet and to the volume manager, and compares the files and
// mounts that they create.
func TestParity(t *testing.T) {
	ns := newNamespace(t, "parity")
	n := nodes()[0]
	uids := map[string]string{}
	p := &parity{
		t: t, ns: ns, node: n, uids: uids, used: map[difference]bool{},
		kubelet: &side{name: "kubelet", node: n, uids: uids, root: "/var/lib/kubelet", host: parityDir + "/hosts/kubelet"},
		manager: &side{name: "manager", node: n, uids: uids, root: parityDir + "/root", host: parityDir + "/hosts/manager"},
	}
	p.begin()
	var text strings.Builder
	for _, c := range parityCases {
		text.WriteString(c.manifest(n.name))
	}
	p.apply(parityObjects + text.String())
	for _, c := range parityCases {
		t.Run(c.name, func(t *testing.T) { p.compare(t, c) })
	}
	t.Run("changes", p.change)
	t.Run("killed", p.kill)
	if !t.Failed() {
		p.checkDifferences()
	}
}

// parityDir is the directory on the node that contains all files of the test.
const parityDir = "/var/lib/parity"

// parity is the state of TestParity.
type parity struct {
	t                *testing.T
	ns               string
	node             node
	kubelet, manager *side
	// uids contains the UIDs of all objects, by kind and name.
	uids map[string]string
	// used contains the differences that have occurred.
	used map[difference]bool
}

// begin starts a driver and the manager. They end with the test.
func (p *parity) begin() {
	p.t.Helper()
	for _, s := range p.sides() {
		s.fill(p.t)
	}
	for _, dir := range []string{"manifests", "root", "flexvolume"} {
		mkdir(p.t, p.node.path(filepath.Join(parityDir, dir)), 0o755)
	}
	config := fmt.Sprintf("pools:\n- {name: default, directory: {path: %s/pool}}\n", parityDir)
	write(p.t, p.node.path(parityDir+"/config.yaml"), config, 0o600)
	p.t.Cleanup(p.end)
	p.node.start(p.t, program(), "driver", "--endpoint=unix://"+parityDir+"/csi.sock", "--node-id="+p.node.name, "--config="+parityDir+"/config.yaml",
		"--state-dir="+parityDir+"/state", "--plugins-registry="+parityDir+"/root/plugins_registry", "--http-address=")
	p.startManager()
	for _, object := range []string{"csidriver/" + driverName, "storageclass/trivet-loop"} {
		p.manager.put(p.t, strings.ReplaceAll(object, "/", "-"), decode(p.t, kubectl(p.t, "get", object, "-o", "json"))...)
	}
}

func (p *parity) sides() []*side { return []*side{p.kubelet, p.manager} }

// program returns the path of the trivet program that test/e2e/run has built.
func program() string { return filepath.Join(os.Getenv("TRIVET_E2E_STATE"), flexProgram) }

// startManager starts the volume manager.
func (p *parity) startManager() {
	p.t.Helper()
	p.node.start(p.t, program(), "volume-manager", "--manifests="+parityDir+"/manifests", "--root-dir="+parityDir+"/root",
		"--volume-plugin-dir="+parityDir+"/flexvolume", "--http-address=", "--node-name="+p.node.name)
}

// end removes the manager's manifests, waits until the manager has removed its volumes, ends the processes, and
// removes the objects and files of the test.
func (p *parity) end() {
	for _, name := range []string{"pods", "objects"} {
		if err := os.Remove(p.manager.manifest(name)); err != nil && !os.IsNotExist(err) {
			p.t.Error(err)
		}
		eventually(p.t, 2*time.Minute, "the manager has removed the volumes of "+name, func() (string, bool) { return p.manager.left(name == "objects") })
	}
	p.node.stop(p.t)
	kubectlLast(p.t, "-n", p.ns, "delete", "pod,pvc", "--all", "--timeout=3m")
	kubectlLast(p.t, "delete", "pv", "-l", "test=parity", "--timeout=2m")
	if mounts := p.node.mounts(p.t, func(at string) bool { return strings.HasPrefix(at, parityDir+"/") }); len(mounts) > 0 {
		p.t.Errorf("got mount %s after the test, want none", mounts[0].Mountpoint)
		return
	}
	removeAll(p.t, p.node.path(parityDir))
}

// apply creates the objects of manifests in the cluster, and writes them with their UIDs for the manager. It
// writes the manager's pods last, so that no pod waits for an object.
func (p *parity) apply(text string) {
	p.t.Helper()
	ofKubelet, ofManager := p.objects(text, p.kubelet), p.objects(text, p.manager)
	kubectlInput(p.t, encode(p.t, ofKubelet), "-n", p.ns, "create", "-f", "-")
	uids := map[string]types.UID{}
	for _, o := range decode(p.t, kubectlInput(p.t, encode(p.t, ofKubelet), "-n", p.ns, "get", "-f", "-", "-o", "json")) {
		uids[o.GetKind()+"/"+o.GetName()] = o.GetUID()
	}
	for _, o := range ofManager {
		o.SetUID(uids[o.GetKind()+"/"+o.GetName()])
		p.uids[o.GetKind()+"/"+o.GetName()] = string(o.GetUID())
	}
	for _, file := range []string{"objects", "pods"} {
		fresh := filter(ofManager, func(o object) bool { return (o.GetKind() == "Pod") == (file == "pods") })
		p.manager.put(p.t, file, append(p.manager.wanted[file], fresh...)...)
	}
}

// objects decodes manifests for a side.
func (p *parity) objects(text string, s *side) []object {
	p.t.Helper()
	all := decode(p.t, strings.ReplaceAll(text, "HOST", s.host))
	for _, o := range all {
		labels := map[string]string{"test": "parity"}
		maps.Copy(labels, o.GetLabels())
		o.SetLabels(labels)
		if o.GetKind() != "PersistentVolume" {
			o.SetNamespace(p.ns)
		}
	}
	return all
}

// compare waits until both sides have set up or refused a pod, and compares the results.
func (p *parity) compare(t *testing.T, c parityCase) {
	t.Helper()
	kubelet, manager := p.expected(c)
	eventually(t, time.Minute, "the kubelet reports the pod as "+kubelet, func() (string, bool) { return p.kubeletSays(t, c.name, kubelet) })
	eventually(t, 20*time.Second, "the manager reports the pod as "+manager, func() (string, bool) { return p.managerSays(c.name, manager) })
	a, b := tree{"outcome": kubelet}, tree{"outcome": manager}
	if kubelet == ready && manager == ready {
		maps.Copy(a, p.kubelet.tree(t, c.name))
		maps.Copy(b, p.manager.tree(t, c.name))
	}
	p.compareTrees(t, c.name, a, b)
}

// Outcomes for a pod.
const (
	ready   = "ready"
	refused = "refused"
)

// expected returns the outcomes for a pod. They are equal unless a documented difference applies.
func (p *parity) expected(c parityCase) (kubelet, manager string) {
	outcome := ready
	if c.refused {
		outcome = refused
	}
	for _, d := range differences {
		if d.path == c.name+"/outcome" {
			return d.kubelet, d.manager
		}
	}
	return outcome, outcome
}

// kubeletSays returns the kubelet's status and warnings of a pod, and whether they mean the outcome.
func (p *parity) kubeletSays(t *testing.T, pod, outcome string) (string, bool) {
	events, err := client.CoreV1().Events(p.ns).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
	if err != nil {
		return err.Error(), false
	}
	var warnings []string
	for _, e := range events.Items {
		if e.Type == "Warning" && e.Source.Component == "kubelet" {
			warnings = append(warnings, e.Reason+": "+e.Message)
		}
	}
	is := kubectl(t, "-n", p.ns, "get", "pod", pod, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
	state := fmt.Sprintf("ready: %s, %q", is, warnings)
	if outcome == ready {
		return state, is == "True"
	}
	return state, is != "True" && len(warnings) > 0
}

// managerSays returns the manager's status of a pod, and whether it means the outcome.
func (p *parity) managerSays(pod, outcome string) (string, bool) {
	volumes, problems, err := p.manager.statusOf(p.ns, pod)
	if err != nil {
		return err.Error(), false
	}
	state := fmt.Sprintf("%v %v", volumes, problems)
	if outcome == ready {
		mounted := !slices.ContainsFunc(volumes, func(v string) bool { return !strings.HasPrefix(v, "Mounted ") })
		return state, len(volumes) > 0 && mounted
	}
	// A volume that is not mounted and has a message has failed.
	failed := slices.ContainsFunc(volumes, func(v string) bool { return !strings.HasPrefix(v, "Mounted ") && !strings.HasSuffix(v, ": ") })
	return state, failed || len(problems) > 0
}

// compareTrees fails for each difference that is not documented.
func (p *parity) compareTrees(t *testing.T, pod string, kubelet, manager tree) {
	t.Helper()
	both := maps.Clone(kubelet)
	maps.Copy(both, manager)
	for _, path := range slices.Sorted(maps.Keys(both)) {
		a, b := kubelet[path], manager[path]
		if a == b {
			continue
		}
		i := slices.IndexFunc(differences, func(d difference) bool {
			return d.covers(pod+"/"+path, a, b)
		})
		if i < 0 {
			t.Errorf("%s/%s: got an undocumented difference:\n\tkubelet: %s\n\tmanager: %s", pod, path, a, b)
			continue
		}
		p.used[differences[i]] = true
	}
}

// change makes the parityChanges, and compares the volumes of the affected pods.
func (p *parity) change(t *testing.T) {
	for _, c := range parityChanges {
		_, err := tryKubectlInput(t.Context(), c.manifest, "-n", p.ns, "replace", "-f", "-")
		if (err != nil) != c.refused {
			t.Errorf("replacing %s: got error %v, want refused: %t", c.manifest, err, c.refused)
		}
		p.manager.replace(t, decode(t, c.manifest)[0])
	}
	for _, s := range p.sides() {
		eventually(t, 2*time.Minute, "the volumes of the "+s.name+" have the new content", func() (string, bool) {
			changed := s.content("changing", "volumes/kubernetes.io~configmap/data/added")
			becameKey := s.content("subpath-becomes-key", "volumes/kubernetes.io~configmap/data/..data/subpath")
			return changed + "; " + becameKey, changed == "x" && becameKey == "file"
		})
	}
	for _, name := range []string{"changing", "subpath-becomes-key", "fixed"} {
		p.compareTrees(t, name+"-changed", p.kubelet.tree(t, name), p.manager.tree(t, name))
	}
}

// kill creates chownedFiles files, whose group then changes to chownGroup.
const (
	chownedFiles = 10000
	chownGroup   = 4711
)

// kill kills the kubelet and the manager while they change the group of the files of a volume (fsGroup). It
// compares the files after both have started again.
func (p *parity) kill(t *testing.T) {
	filling := parityCase{name: "walk-fill", objects: driverClaim("walked", "Filesystem", "512Mi"), volumes: []string{claimVolume("walked")}, container: mountedData("")}
	p.apply(filling.manifest(p.node.name))
	p.compare(t, filling)
	for _, s := range p.sides() {
		for i := range chownedFiles {
			write(t, s.chownedFile("walk-fill", i), "", 0o600)
		}
	}
	p.remove(t, "walk-fill")
	walked := parityCase{name: "walk", volumes: filling.volumes, container: filling.container, spec: fmt.Sprintf("securityContext: {fsGroup: %d}", chownGroup)}
	p.apply(walked.manifest(p.node.name))
	var waits sync.WaitGroup
	waits.Go(func() { p.kubelet.killDuringChown(t, p.node.kubeletProcesses()...) })
	waits.Go(func() { p.manager.killDuringChown(t, processes(program(), "volume-manager")...) })
	waits.Wait()
	p.startManager()
	p.compare(t, walked)
	for _, s := range p.sides() {
		if left := s.countWithoutGroup(); left > 0 {
			t.Errorf("%s: got %d files without the group, want 0", s.name, left)
		}
	}
}

// remove deletes a pod on both sides, and waits until its directories are removed.
func (p *parity) remove(t *testing.T, pod string) {
	t.Helper()
	kubectl(t, "-n", p.ns, "delete", "pod", pod, "--timeout=2m")
	p.manager.put(t, "pods", filter(p.manager.wanted["pods"], func(o object) bool { return o.GetName() != pod })...)
	for _, s := range p.sides() {
		eventually(t, time.Minute, "the "+s.name+" has removed the pod", func() (string, bool) {
			_, err := os.Lstat(s.node.throughMounts(s.podDir(pod)))
			return fmt.Sprint(err), errors.Is(err, fs.ErrNotExist)
		})
	}
}

// chownedFile returns the path of the i-th file in the volume of kill.
func (s *side) chownedFile(pod string, i int) string {
	return s.node.throughMounts(filepath.Join(s.podDir(pod), "volumes/kubernetes.io~csi/pvc-"+s.uids["PersistentVolumeClaim/walked"], "mount", fmt.Sprintf("%06d", i)))
}

// hasGroup reports whether the i-th file in the volume of the pod walk has the group chownGroup.
func (s *side) hasGroup(i int) bool {
	var st unix.Stat_t
	return unix.Stat(s.chownedFile("walk", i), &st) == nil && st.Gid == chownGroup
}

// countWithoutGroup returns the number of files without the group chownGroup.
func (s *side) countWithoutGroup() (left int) {
	for i := range chownedFiles {
		if !s.hasGroup(i) {
			left++
		}
	}
	return left
}

// killDuringChown kills processes as soon as the first file has the group.
func (s *side) killDuringChown(t *testing.T, pids ...int) {
	for deadline := time.Now().Add(time.Minute); !s.hasGroup(0) && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	kill(pids...)
	t.Logf("%s was killed when %d of %d files did not have the group yet", s.name, s.countWithoutGroup(), chownedFiles)
}

// checkDifferences fails unless all differences have occurred, and the documentation lists them and no others.
func (p *parity) checkDifferences() {
	p.t.Helper()
	documented := map[string]bool{}
	_, section, _ := strings.Cut(read(p.t, "../../docs/volume-manager.md"), "\n## Differences from a kubelet\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(section) {
		if cells := strings.Split(line, "|"); len(cells) > 3 && strings.HasPrefix(line, "| ") && !strings.HasPrefix(line, "| difference ") {
			documented[strings.TrimSpace(cells[1])] = false
		}
	}
	for _, d := range differences {
		if !p.used[d] {
			p.t.Errorf("the difference %q did not occur: remove it from this test and from docs/volume-manager.md", d)
		}
		if _, found := documented[d.name]; !found {
			p.t.Errorf("docs/volume-manager.md does not list the difference %q", d.name)
		}
		documented[d.name] = true
	}
	for name, known := range documented {
		if !known {
			p.t.Errorf("docs/volume-manager.md lists the difference %q, which is not in this test", name)
		}
	}
}

// fill creates the files below HOST that pods use.
func (s *side) fill(t *testing.T) {
	t.Helper()
	at := s.node.path(s.host)
	mkdir(t, at+"/host/dir", 0o2750)
	write(t, at+"/host/file", "text", 0o640)
	must(t, unix.Mknod(at+"/host/socket", unix.S_IFSOCK|0o600, 0))
	for _, name := range []string{"linked", "leads-out", "has-file"} {
		mkdir(t, filepath.Join(at, name, "real"), 0o755)
	}
	must(t, os.Symlink("real", at+"/linked/inside"))
	must(t, os.Symlink("/etc", at+"/leads-out/outside"))
	write(t, at+"/has-file/file", "text", 0o600)
	for _, name := range []string{"files", "owned", "owned-by-root"} {
		dir := filepath.Join(at, name)
		mkdir(t, dir+"/sub/deep", 0o700)
		write(t, dir+"/closed", "text", 0o400)
		write(t, dir+"/program", "text", 0o4755)
		must(t, os.Symlink("closed", dir+"/link"))
		must(t, os.Symlink("/none", dir+"/sub/dangling"))
		must(t, unix.Mkfifo(dir+"/pipe", 0o600))
		must(t, unix.Mknod(dir+"/socket", unix.S_IFSOCK|0o600, 0))
		must(t, unix.Mknod(dir+"/char", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
		must(t, unix.Mknod(dir+"/sub/block", unix.S_IFBLK|0o600, int(unix.Mkdev(7, 250))))
	}
	// With OnRootMismatch, neither side changes the files below a root that already has the group.
	must(t, os.Chown(at+"/owned-by-root", 0, 4711))
	must(t, unix.Chmod(at+"/owned-by-root", 0o2770))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// mkdir creates a directory with exactly the given mode, and its parents.
func mkdir(t *testing.T, path string, mode uint32) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o755))
	must(t, unix.Chmod(path, mode))
}

// write writes a file with exactly the given mode.
func write(t *testing.T, path, text string, mode uint32) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o600))
	must(t, unix.Chmod(path, mode))
}

// filter returns the elements for which keep returns true.
func filter[T any](all []T, keep func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(all), func(x T) bool { return !keep(x) })
}
