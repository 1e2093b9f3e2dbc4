package flexvolume_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
)

// TestInit: init returns the capabilities, unsupported calls are answered as such, and calls with too few arguments
// are refused.
func TestInit(t *testing.T) {
	k := newKubelet(t, t.TempDir())
	for driver, isNFS := range map[string]bool{"trivet": false, "loop": false, "local": false, "nfs": true} {
		c := k.succeed(driver, "init").Capabilities
		if c == nil || c.Attach || c.SupportsMetrics || c.FSGroup == isNFS || c.RequiresFSResize == isNFS {
			t.Errorf("%s: got capabilities %+v, want fsGroup and requiresFSResize %t, and no others", driver, c, !isNFS)
		}
	}
	for _, call := range []string{"attach", "getvolumename", "waitforattach", "isattached", "mountdevice", "unmountdevice", "detach", "dance"} {
		if a := k.call("loop", call, "{}"); a != (flexvolume.Answer{Status: flexvolume.NotSupported}) {
			t.Errorf("%s: got %+v, want Not supported", call, a)
		}
	}
	k.refuse("no call is given", "loop")
	k.refuse("mount has 1 arguments: 2 are required", "loop", "mount", "/x")
}

// TestLifecycle: the first call creates a volume, which several pods mount. The last call to unmount unstages the
// volume, and the next call to mount finds the data.
func TestLifecycle(t *testing.T) {
	for _, tc := range []struct {
		driver, backend, poolFS, fsType string
	}{
		{"loop", "", "xfs", "xfs"},
		{"trivet", "loop", "ext4", "btrfs"},
		{"local", "", "btrfs with simple quotas", ""},
		{"trivet", "local", "btrfs with simple quotas", ""},
	} {
		t.Run(tc.driver+" "+tc.backend+" on "+tc.poolFS, func(t *testing.T) {
			var fs string
			if tc.fsType == "" {
				fs = testenv.SimpleQuotas(t, "2G")
			} else {
				fs = testenv.Filesystem(t, tc.poolFS, "2G")
			}
			k := newKubelet(t, fs)
			common := []string{"kubernetes.io/fsType", tc.fsType, "size", "320Mi"}
			if tc.backend != "" {
				common = append(common, "backend", tc.backend)
			}
			k.lifecycle(tc.driver, func(extra ...string) string { return options(append(common, extra...)...) })
		})
	}
}

// lifecycle runs the calls of TestLifecycle. The parameter of returns the volume's options with extra ones.
func (k *kubelet) lifecycle(driver string, of func(extra ...string) string) {
	web, db, reader := k.target("web"), k.target("db"), k.target("reader")
	k.refuse("set option size", driver, "mount", web, strings.Replace(of(), `,"size":"320Mi"`, "", 1))
	k.succeed(driver, "mount", web, of())
	k.succeed(driver, "mount", db, of())
	k.succeed(driver, "mount", reader, of("kubernetes.io/readwrite", "ro"))
	k.succeed(driver, "mount", db, of()) // already mounted
	k.write(filepath.Join(web, "file"), "kept")
	k.read(filepath.Join(db, "file"), "kept")
	if err := os.WriteFile(filepath.Join(reader, "file"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		k.t.Errorf("writing to a read-only mount: got error %v, want EROFS", err)
	}

	before := size(k.t, web)
	if a := k.succeed(driver, "expandvolume", of(), "", fmt.Sprint(640<<20), fmt.Sprint(320<<20)); a.NewSize != 640<<20 {
		k.t.Errorf("expandvolume: got %+v, want volumeNewSize %d", a, 640<<20)
	}
	k.succeed(driver, "expandfs", of(), "", "", fmt.Sprint(640<<20), fmt.Sprint(320<<20))
	if !strings.Contains(of(), `fsType":""`) { // without a filesystem of its own, a volume reports the size of its pool's filesystem
		if after := size(k.t, web); after < before*3/2 {
			k.t.Errorf("the filesystem had %d bytes before and %d bytes after the expansion, want 1.5 times as many", before, after)
		}
	}

	k.succeed(driver, "unmount", web)
	k.read(filepath.Join(db, "file"), "kept")
	k.succeed(driver, "unmount", reader)
	k.succeed(driver, "unmount", db)
	k.succeed(driver, "unmount", db) // already unmounted
	k.checkNothingLeft()

	web = k.target("web")
	k.succeed(driver, "mount", web, of())
	k.read(filepath.Join(web, "file"), "kept")
	k.succeed(driver, "unmount", web)
}

// TestAnotherVolume: a target directory has one volume at a time. If a killed call left a volume without a mount, the next
// call cleans it up.
func TestAnotherVolume(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "2G"))
	at := k.target("web")
	of := func(volume string) string { return options("size", "32Mi", "volume", volume) }
	k.succeed("loop", "mount", at, of("one"))
	k.refuse("unmount it there first", "loop", "mount", at, of("two"))
	must(t, syscall.Unmount(at, 0)) // the state after a killed call
	k.succeed("loop", "mount", at, of("two"))
	k.succeed("loop", "unmount", at)
}

// TestConcurrentCalls: concurrent calls for one pool wait for each other, and all succeed.
func TestConcurrentCalls(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "2G"))
	const pods = 8
	var targets []string
	for i := range pods {
		targets = append(targets, k.target(fmt.Sprint("pod", i)))
	}
	of := func(i int) string { return options("size", "32Mi", "volume", fmt.Sprint("v", i%3)) }
	runConcurrently(pods, func(i int) { k.succeed("loop", "mount", targets[i], of(i)) })
	for i, at := range targets {
		k.write(filepath.Join(at, fmt.Sprint(i)), "x")
	}
	runConcurrently(pods, func(i int) { k.succeed("loop", "unmount", targets[i]) })
}

// TestBadInput: calls with invalid values are refused, the error names the value, and no state is left.
func TestBadInput(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	full := k.target("full")
	k.write(filepath.Join(full, "file"), "foreign")
	for _, tc := range []struct {
		driver, says string
		words        []string
	}{
		{"loop", "must be a JSON object", []string{"mount", k.target("a"), "{"}},
		{"loop", "must be a JSON object", []string{"mount", k.target("a"), `{"size": 1}`}},
		{"loop", `parameter siez="1Gi" is unknown`, []string{"mount", k.target("a"), options("siez", "1Gi")}},
		{"loop", `option size="big"`, []string{"mount", k.target("a"), options("size", "big")}},
		{"loop", `option pool="other"`, []string{"mount", k.target("a"), options("pool", "other")}},
		{"loop", `option backend="nfs"`, []string{"mount", k.target("a"), options("backend", "nfs")}},
		{"loop", `option server="nas"`, []string{"mount", k.target("a"), options("server", "nas", "share", "/e")}},
		{"loop", `fstype="ntfs"`, []string{"mount", k.target("a"), options("size", "32Mi", "kubernetes.io/fsType", "ntfs")}},
		{"loop", `mount_flags`, []string{"mount", k.target("a"), options("size", "32Mi", "mountOptions", "bind")}},
		{"loop", "is not empty", []string{"mount", full, options("size", "32Mi")}},
		{"loop", "must be an absolute path", []string{"mount", "relative", options("size", "32Mi")}},
		{"nfs", `options server="", share="/e"`, []string{"mount", k.target("a"), options("share", "/e")}},
		{"nfs", `option pool="flex": an NFS directory has only the options`, []string{"mount", k.target("a"), options("server", "nas", "share", "/e", "pool", "flex")}},
		{"nfs", `server="nas/x"`, []string{"mount", k.target("a"), options("server", "nas/x", "share", "/e")}},
		{"nfs", `server="nas/x"`, []string{"mount", k.target("a"), options("server", "nas/x", "export", "/e")}},
		{"local", `size "0x10"`, []string{"expandvolume", options(), "", "0x10", "1"}},
		{"loop", "it stays", []string{"unmount", full}},
	} {
		k.refuse(tc.says, tc.driver, tc.words...)
	}
	k.read(filepath.Join(full, "file"), "foreign")
	other := k.target("other")
	testenv.Run(t, "mount", "-t", "tmpfs", "tmpfs", other)
	t.Cleanup(func() { testenv.Run(t, "umount", other) })
	k.refuse("other than this volume", "loop", "unmount", other)
}

// TestForeignDriver: a pool that another driver uses cannot be used, and the error states the reason. A
// mounted volume can be unmounted.
func TestForeignDriver(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	web := k.target("web")
	k.succeed("loop", "mount", web, options("size", "32Mi"))
	k.awaitIdle()
	state, err := os.OpenRoot(t.TempDir())
	must(t, err)
	defer state.Close()
	p, err := pool.Open(t.Context(), nil, pool.Config{Name: "flex", Directory: pool.Directory{Path: k.pool}}, state, nil)
	must(t, err)
	defer p.Close()
	k.refuse("is in use by another driver", "loop", "mount", k.target("db"), options())
	k.succeed("loop", "unmount", web)
}

// TestKilled: calls are killed at random moments, and some are repeated. Written data persists, each
// pod gets the volume that it requests, each volume keeps its namespace, and no state remains at the end.
func TestKilled(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "2G"))
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	h := &history{kubelet: k, rand: rand.New(rand.NewPCG(seed, 0)), mounted: map[string]string{}, written: map[string]string{}}
	for range 60 {
		h.step()
	}
	for pod := range h.mounted {
		h.unmount(pod)
	}
	k.succeed("loop", "init") // cleans up after killed calls
	for volume := range h.written {
		k.refuse(`belongs to namespace "shop"`, "loop", "mount", k.target("thief"), options("volume", volume, "kubernetes.io/pod.namespace", "thief"))
	}
}

// TestKilledWriter: unmount removes the temporary file of a record whose writer was killed, with and without a record.
func TestKilledWriter(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	web := k.target("web")
	k.succeed("loop", "mount", web, options("size", "32Mi"))
	records, err := filepath.Glob(filepath.Join(k.state, "targets", "*.json"))
	must(t, err)
	if len(records) != 1 {
		t.Fatalf("got records %q, want one", records)
	}
	for range 2 {
		k.write(records[0]+".tmp", "{")
		k.succeed("loop", "unmount", web)
		k.checkNothingLeft()
	}
}

// history records which volume each pod has mounted, and the content of each volume.
type history struct {
	*kubelet
	rand    *rand.Rand
	mounted map[string]string // the volume of each pod
	written map[string]string // what was last written to each volume
}

// step mounts a volume in a random pod, or unmounts the volume of the pod.
func (h *history) step() {
	pod := fmt.Sprint("pod", h.rand.IntN(4))
	if _, has := h.mounted[pod]; has {
		h.unmount(pod)
		return
	}
	volume := fmt.Sprint("v", h.rand.IntN(2))
	at := h.target(pod)
	if !h.killSome("mount", at, options("size", "32Mi", "volume", volume)) {
		h.checkGone(at)
		return
	}
	h.mounted[pod] = volume
	file := filepath.Join(at, "file")
	if text, ok := h.written[volume]; ok {
		h.read(file, text)
	}
	text := fmt.Sprint(h.rand.Int64())
	h.write(file, text)
	h.written[volume] = text
}

// unmount unmounts the volume of a pod. It repeats killed calls.
func (h *history) unmount(pod string) {
	at := h.target(pod)
	for !h.killSome("unmount", at) {
	}
	h.checkGone(at)
	delete(h.mounted, pod)
}

// checkGone fails the test if a volume is still mounted at a path. If one is, it first repeats unmount, as a restarted
// kubelet does.
func (h *history) checkGone(at string) {
	h.t.Helper()
	if e, err := mount.OnPath(at); e != nil || err != nil {
		h.succeed("loop", "unmount", at)
	}
	if e, err := mount.OnPath(at); e != nil || err != nil {
		h.t.Errorf("got mount %v, error %v at %s, want none", e, err, at)
	}
}

// killSome makes a call up to four times, and may kill each attempt but the last before it ends. It may give up after a
// killed attempt. It reports whether an attempt succeeded.
func (h *history) killSome(words ...string) bool {
	for range h.rand.IntN(4) {
		if h.tryKilling(words...) {
			return true
		}
		if h.rand.IntN(4) == 0 {
			return false
		}
	}
	h.succeed("loop", words...)
	return true
}

// tryKilling makes a call, and kills it after a random time unless it has ended. It reports whether the call succeeded.
func (h *history) tryKilling(words ...string) bool {
	h.t.Helper()
	c := h.command("loop", words...)
	out, err := c.StdoutPipe()
	must(h.t, err)
	must(h.t, c.Start())
	timer := time.AfterFunc(time.Duration(h.rand.IntN(80))*time.Millisecond, func() { _ = c.Process.Kill() })
	defer timer.Stop()
	var a flexvolume.Answer
	decodeErr := json.NewDecoder(out).Decode(&a)
	_ = c.Wait()
	if decodeErr == nil && a.Status != flexvolume.Success {
		h.t.Errorf("%q: got %+v, want success or no answer", words, a)
	}
	return decodeErr == nil && a.Status == flexvolume.Success
}

// TestNamespace: a volume belongs to the namespace of the pod that mounted it first, even after it was unmounted. An
// administrator can assign the volume to another namespace.
func TestNamespace(t *testing.T) {
	k := newKubelet(t, testenv.SimpleQuotas(t, "2G"))
	for _, driver := range []string{"loop", "local"} {
		t.Run(driver, func(t *testing.T) { k.on(t).namespaces(driver) })
	}
}

// namespaces is TestNamespace for one FlexVolume driver.
func (k *kubelet) namespaces(driver string) {
	of := func(namespace string, extra ...string) string {
		return options(append(extra, "kubernetes.io/pod.namespace", namespace, "volume", driver)...)
	}
	shop, thief := k.target("shop"), k.target("thief")
	k.succeed(driver, "mount", shop, of("shop", "size", "160Mi"))
	k.write(filepath.Join(shop, "file"), "secret")
	refused := func() {
		k.refuse(`belongs to namespace "shop"`, driver, "mount", thief, of("thief"))
		k.refuse(`belongs to namespace "shop"`, driver, "mount", thief, of("thief", "size", "160Mi"))
		k.refuse(`belongs to namespace "shop"`, driver, "mount", thief, of("thief", "kubernetes.io/readwrite", "ro"))
		k.refuse("option kubernetes.io/pod.namespace is missing", driver, "mount", thief, of(""))
	}
	refused()
	k.refuse("is mounted", driver, "assign", "thief", of("shop"))
	second := k.target("second")
	k.succeed(driver, "mount", second, of("shop"))
	k.succeed(driver, "unmount", second)
	k.succeed(driver, "unmount", shop)
	refused()

	k.refuse(`namespace "Not A Namespace"`, driver, "assign", "Not A Namespace", of("shop"))
	k.succeed(driver, "assign", "heir", of("shop"))
	k.refuse(`belongs to namespace "heir"`, driver, "mount", k.target("shop"), of("shop"))
	heir := k.target("heir")
	k.succeed(driver, "mount", heir, of("heir"))
	k.read(filepath.Join(heir, "file"), "secret")
	k.succeed(driver, "unmount", heir)
}

// TestNoNamespace: a volume without a recorded namespace, such as one of CSI, cannot be mounted before an administrator
// assigns it to a namespace.
func TestNoNamespace(t *testing.T) {
	k := newKubelet(t, testenv.SimpleQuotas(t, "2G"))
	of := func(namespace string) string {
		return options("kubernetes.io/pod.namespace", namespace, "volume", "data", "size", "160Mi")
	}
	shop, second, thief := k.target("shop"), k.target("second"), k.target("thief")
	k.succeed("loop", "mount", shop, of("shop"))
	k.succeed("loop", "unmount", shop)
	k.forgetNamespace()
	k.refuse("with the call assign", "loop", "mount", thief, of("thief"))
	k.refuse("with the call assign", "loop", "mount", second, of("shop"))
	k.succeed("loop", "assign", "shop", of(""))
	k.succeed("loop", "mount", second, of("shop"))
	k.refuse(`belongs to namespace "shop"`, "loop", "mount", thief, of("thief"))
	k.succeed("loop", "unmount", second)
}

// forgetNamespace removes the namespace from the record of the pool's only volume.
func (k *kubelet) forgetNamespace() {
	k.t.Helper()
	records, err := filepath.Glob(filepath.Join(k.pool, "volumes", "*", "volume.json"))
	must(k.t, err)
	if len(records) != 1 {
		k.t.Fatalf("got the records %q, want one", records)
	}
	b, err := os.ReadFile(records[0])
	must(k.t, err)
	var record map[string]any
	must(k.t, json.Unmarshal(b, &record))
	delete(record, "namespace")
	b, err = json.Marshal(record)
	must(k.t, err)
	must(k.t, os.WriteFile(records[0], b, 0o600))
}

// TestSubDir: the option subDir is refused, because a pod could select another user's directory in the pool with it.
func TestSubDir(t *testing.T) {
	k := newKubelet(t, testenv.SimpleQuotas(t, "2G"))
	k.refuse("set option size", "local", "mount", k.target("web"), options()) // creates the pool
	must(t, os.MkdirAll(filepath.Join(k.pool, "others"), 0o700))
	for _, dir := range []string{"others", "new"} {
		k.refuse(`option subDir="`+dir+`"`, "local", "mount", k.target("web"), options("size", "32Mi", "subDir", dir, "onDelete", "retain"))
	}
}
