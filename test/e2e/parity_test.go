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

// difference is one of docs/volume-manager.md: what a pod has otherwise than under a
// kubelet. All but the name are expressions for the whole text; an empty one is for what
// is absent.
type difference struct{ name, path, kubelet, manager string }

// differences are all there may be. One that does not occur fails the test.
var differences = []difference{
	{"Addresses of nodes", "expr-address/outcome", ready, refused},
	{"Annotations of the kubelet", inMemory + `/..DATE/annotations content`, `.*config.seen.*`, `.+`},
	// volumes is also 0755 if the kubelet mounts before it has created the pod's directories.
	{"Directories of plugins", `[^/]+/volumes(/kubernetes.io~(empty-dir|configmap|secret|downward-api|projected))?`, `040000 0755 0:0`, `040000 0750 0:0`},
	{"Directories of pods", `(host|claim-device)/volumes`, `040000 0750 0:0`, ``},
	{"Links to tokens", inMemory + `/token`, `0120000 0777 1000:.+`, `0120000 0777 0:.+`},
	{"Records of CSI volumes", `[^/]+/volumes/kubernetes.io~csi/[^/]+/vol_data.json`, `0100000 0644 0:0`, `0100000 0600 0:0`},
	{"Records of CSI volumes", `[^/]+/volumes/kubernetes.io~csi/[^/]+/vol_data.json content`, `.+`, `.+`},
	{"Resources of the machine", `payload-machine/volumes/kubernetes.io~downward-api/data/..DATE/(memory|storage) content`, `"\d+"`, `"\d+"`},
	{"Resources of the machine", `empty/volumes/kubernetes.io~empty-dir/memory size`, `\d+`, `\d+`},
	{"Service account tokens", inMemory + `/..DATE/token content`, `.+`, `.+`},
	{"Services", "expr-service/outcome", ready, refused},
	{"Size of what is projected", inMemory + ` (size|inodes)`, `\d+`, `\d+`},
	{"Unused volumes", `unused/volumes/kubernetes.io~empty-dir(/data)?`, "", "040000 .*"},
}

// inMemory is a volume of the kinds that are not on a disk.
const inMemory = `[^/]+/volumes/kubernetes.io~(secret|downward-api|projected)/[^/]+`

func (d difference) covers(path, kubelet, manager string) bool {
	return whole(d.path, path) && whole(d.kubelet, kubelet) && whole(d.manager, manager)
}

func whole(expression, text string) bool {
	return regexp.MustCompile("^(?s:" + expression + ")$").MatchString(text)
}

// TestParity applies the same manifests to a kubelet and to the volume manager, and compares
// what both make of them.
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

// parityDir is where all is on the node.
const parityDir = "/var/lib/parity"

type parity struct {
	t                *testing.T
	ns               string
	node             node
	kubelet, manager *side
	// uids are those of all objects, by kind and name.
	uids map[string]string
	// used are the differences that have occurred.
	used map[difference]bool
}

// begin starts a driver and the manager, with what they need, and ends them with the test.
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

// program is what test/e2e/run builds in the cluster's folder.
func program() string { return filepath.Join(os.Getenv("TRIVET_E2E_STATE"), flexProgram) }

func (p *parity) startManager() {
	p.t.Helper()
	p.node.start(p.t, program(), "volume-manager", "--manifests="+parityDir+"/manifests", "--root-dir="+parityDir+"/root",
		"--volume-plugin-dir="+parityDir+"/flexvolume", "--http-address=", "--node-name="+p.node.name)
}

// end takes down what the manager has, and removes what the test has made. The processes
// have ended when it returns.
func (p *parity) end() {
	for _, name := range []string{"pods", "objects"} {
		if err := os.Remove(p.manager.manifest(name)); err != nil && !os.IsNotExist(err) {
			p.t.Error(err)
		}
		eventually(p.t, 2*time.Minute, "the manager takes down what is not wanted", func() (string, bool) { return p.manager.left(name == "objects") })
	}
	p.node.stop(p.t)
	kubectlLast(p.t, "-n", p.ns, "delete", "pod,pvc", "--all", "--timeout=3m")
	kubectlLast(p.t, "delete", "pv", "-l", "test=parity", "--timeout=2m")
	if mounts := p.node.mounts(p.t, func(at string) bool { return strings.HasPrefix(at, parityDir+"/") }); len(mounts) > 0 {
		p.t.Errorf("%s is mounted", mounts[0].Mountpoint)
		return
	}
	if err := os.RemoveAll(p.node.path(parityDir)); err != nil {
		p.t.Error(err)
	}
}

// apply gives manifests to both sides, with the UIDs of the cluster. Pods of the manager
// come last: nothing is to wait for an object.
func (p *parity) apply(text string) {
	p.t.Helper()
	ofKubelet, ofManager := p.objects(text, p.kubelet), p.objects(text, p.manager)
	pipe(p.t, encode(p.t, ofKubelet), "-n", p.ns, "create", "-f", "-")
	uids := map[string]types.UID{}
	for _, o := range decode(p.t, pipe(p.t, encode(p.t, ofKubelet), "-n", p.ns, "get", "-f", "-", "-o", "json")) {
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

// objects are those of manifests as a side gets them.
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

// compare waits until both sides have made of a pod what can be made of it, and compares.
func (p *parity) compare(t *testing.T, c parityCase) {
	t.Helper()
	kubelet, manager := p.expected(c)
	eventually(t, time.Minute, "the kubelet: "+kubelet, func() (string, bool) { return p.kubeletSays(t, c.name, kubelet) })
	eventually(t, 20*time.Second, "the manager: "+manager, func() (string, bool) { return p.managerSays(c.name, manager) })
	a, b := tree{"outcome": kubelet}, tree{"outcome": manager}
	if kubelet == ready && manager == ready {
		maps.Copy(a, p.kubelet.tree(t, c.name))
		maps.Copy(b, p.manager.tree(t, c.name))
	}
	p.compareTrees(t, c.name, a, b)
}

// What becomes of a pod.
const (
	ready   = "ready"
	refused = "refused"
)

// expected is what the sides make of a pod: the same, but for documented differences.
func (p *parity) expected(c parityCase) (kubelet, manager string) {
	same := ready
	if c.refused {
		same = refused
	}
	for _, d := range differences {
		if d.path == c.name+"/outcome" {
			return d.kubelet, d.manager
		}
	}
	return same, same
}

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
	said := fmt.Sprintf("ready: %s, %q", is, warnings)
	if outcome == ready {
		return said, is == "True"
	}
	return said, is != "True" && len(warnings) > 0
}

func (p *parity) managerSays(pod, outcome string) (string, bool) {
	volumes, problems, err := p.manager.says(p.ns, pod)
	if err != nil {
		return err.Error(), false
	}
	said := fmt.Sprintf("%v %v", volumes, problems)
	if outcome == ready {
		mounted := !slices.ContainsFunc(volumes, func(v string) bool { return !strings.HasPrefix(v, "Mounted ") })
		return said, len(volumes) > 0 && mounted
	}
	complains := slices.ContainsFunc(volumes, func(v string) bool { return !strings.HasPrefix(v, "Mounted ") && !strings.HasSuffix(v, ": ") })
	return said, complains || len(problems) > 0
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
			t.Errorf("%s/%s\n\tkubelet: %s\n\tmanager: %s", pod, path, a, b)
			continue
		}
		p.used[differences[i]] = true
	}
}

// change changes objects, and compares the volumes of the pods that have them.
func (p *parity) change(t *testing.T) {
	for _, c := range parityChanges {
		_, err := feed(t.Context(), c.manifest, "-n", p.ns, "replace", "-f", "-")
		if (err != nil) != c.refused {
			t.Errorf("%s: %v", c.manifest, err)
		}
		p.manager.replace(t, decode(t, c.manifest)[0])
	}
	for _, s := range p.sides() {
		eventually(t, 2*time.Minute, s.name+" has new content", func() (string, bool) {
			changed := s.content(t, "changing", "volumes/kubernetes.io~configmap/data/added")
			crossed := s.content(t, "crossed", "volumes/kubernetes.io~configmap/data/..data/crossing")
			return changed + "; " + crossed, changed == "key" && crossed == "file"
		})
	}
	for _, name := range []string{"changing", "crossed", "fixed"} {
		p.compareTrees(t, name+"-changed", p.kubelet.tree(t, name), p.manager.tree(t, name))
	}
}

const (
	walkedFiles = 10000
	walkedGroup = 4711
)

// kill ends both sides while they give the files of a volume to a group, and compares what
// they have made of them when they are back.
func (p *parity) kill(t *testing.T) {
	filling := parityCase{name: "walk-fill", objects: driverClaim("walked", "Filesystem", "512Mi"), volumes: []string{ofClaim("walked")}, container: mountedData("")}
	p.apply(filling.manifest(p.node.name))
	p.compare(t, filling)
	for _, s := range p.sides() {
		for i := range walkedFiles {
			write(t, s.walked(t, "walk-fill", i), "", 0o600)
		}
	}
	p.remove(t, "walk-fill")
	walked := parityCase{name: "walk", volumes: filling.volumes, container: filling.container, spec: fmt.Sprintf("securityContext: {fsGroup: %d}", walkedGroup)}
	p.apply(walked.manifest(p.node.name))
	var waits sync.WaitGroup
	waits.Go(func() { p.kubelet.killWhileWalking(t, p.node.kubelet()...) })
	waits.Go(func() { p.manager.killWhileWalking(t, processes(program(), "volume-manager")...) })
	waits.Wait()
	p.startManager()
	p.compare(t, walked)
	for _, s := range p.sides() {
		if left := s.unowned(t); left > 0 {
			t.Errorf("%s: %d files are without the group", s.name, left)
		}
	}
}

// remove deletes a pod on both sides, and waits until it is gone.
func (p *parity) remove(t *testing.T, pod string) {
	t.Helper()
	kubectl(t, "-n", p.ns, "delete", "pod", pod, "--timeout=2m")
	p.manager.put(t, "pods", filter(p.manager.wanted["pods"], func(o object) bool { return o.GetName() != pod })...)
	for _, s := range p.sides() {
		eventually(t, time.Minute, s.name+" removes the pod", func() (string, bool) {
			_, err := os.Lstat(s.inside(t, s.podDir(pod)))
			return fmt.Sprint(err), errors.Is(err, fs.ErrNotExist)
		})
	}
}

// walked is one of the files of the volume, in its order.
func (s *side) walked(t *testing.T, pod string, i int) string {
	t.Helper()
	return s.inside(t, filepath.Join(s.podDir(pod), "volumes/kubernetes.io~csi/pvc-"+s.uids["PersistentVolumeClaim/walked"], "mount", fmt.Sprintf("%06d", i)))
}

// owned tells whether one of the files has the group.
func (s *side) owned(t *testing.T, i int) bool {
	t.Helper()
	var st unix.Stat_t
	return unix.Stat(s.walked(t, "walk", i), &st) == nil && st.Gid == walkedGroup
}

func (s *side) unowned(t *testing.T) (left int) {
	t.Helper()
	for i := range walkedFiles {
		if !s.owned(t, i) {
			left++
		}
	}
	return left
}

// killWhileWalking kills processes as soon as one file has the group.
func (s *side) killWhileWalking(t *testing.T, pids ...int) {
	for deadline := time.Now().Add(time.Minute); !s.owned(t, 0) && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	kill(pids...)
	t.Logf("%s was killed with %d of %d files left", s.name, s.unowned(t), walkedFiles)
}

// checkDifferences fails unless the documentation has the differences that have occurred,
// and no others.
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
			p.t.Errorf("the difference %q does not occur any more: remove it here and in docs/volume-manager.md", d)
		}
		if _, found := documented[d.name]; !found {
			p.t.Errorf("docs/volume-manager.md lacks the difference %q", d.name)
		}
		documented[d.name] = true
	}
	for name, known := range documented {
		if !known {
			p.t.Errorf("docs/volume-manager.md has the difference %q, which no test covers", name)
		}
	}
}

// fill makes the files that pods find on the node.
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
	// Its root is as the kubelet would leave it: the rest is not looked at.
	must(t, os.Chown(at+"/owned-by-root", 0, 4711))
	must(t, unix.Chmod(at+"/owned-by-root", 0o2770))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// mkdir makes a directory, and those above it, whatever the umask.
func mkdir(t *testing.T, path string, mode uint32) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o755))
	must(t, unix.Chmod(path, mode))
}

func write(t *testing.T, path, text string, mode uint32) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o600))
	must(t, unix.Chmod(path, mode))
}

func filter[T any](all []T, keep func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(all), func(x T) bool { return !keep(x) })
}
