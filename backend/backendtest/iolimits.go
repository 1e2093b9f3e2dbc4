package backendtest

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/cgroup"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/test/measure"
)

// modify changes the limits of the volume's I/O. more are keys and values in turn.
func (l *testVolume) modify(t *testing.T, more ...string) error {
	t.Helper()
	mutable := map[string]string{}
	for pair := range slices.Chunk(more, 2) {
		mutable[pair[0]] = pair[1]
	}
	_, err := l.d.Control.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: l.id, MutableParameters: mutable})
	return err
}

// podIn is a pod that uses a volume.
type podIn struct {
	// cgroup is the directory of the pod's cgroup, and target the target path of the volume in the pod.
	cgroup, target string
}

// newPod returns a pod of the kubelet's directory dir. Its cgroup is in a slice of systemd, and does not exist yet.
func newPod(t *testing.T, cgroups, dir string, kind Kind) podIn {
	t.Helper()
	uid := uuid.NewString()
	p := podIn{
		cgroup: filepath.Join(cgroups, "kubepods.slice/kubepods-burstable.slice", "kubepods-burstable-pod"+strings.ReplaceAll(uid, "-", "_")+".slice"),
		target: filepath.Join(dir, "pods", uid, "volumes/kubernetes.io~csi/pv/mount"),
	}
	if kind.Block() {
		p.target = filepath.Join(dir, "plugins/kubernetes.io/csi/volumeDevices/publish/pv", uid)
	}
	must(t, os.MkdirAll(filepath.Dir(p.target), 0o755))
	return p
}

// newHierarchy creates a directory with the files of a cgroup v2 hierarchy that the driver reads.
func newHierarchy(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(root, "kubepods.slice/kubepods-burstable.slice"), 0o755))
	must(t, os.WriteFile(filepath.Join(root, "cgroup.controllers"), []byte("cpu io memory pids\n"), 0o644))
	for _, dir := range []string{"kubepods.slice", "kubepods.slice/kubepods-burstable.slice"} {
		must(t, os.WriteFile(filepath.Join(root, dir, "cgroup.subtree_control"), []byte("cpu io memory pids\n"), 0o644))
	}
	must(t, os.WriteFile(filepath.Join(root, "kubepods.slice/io.max"), nil, 0o644))
	return root
}

// start creates the files of the pod's cgroup.
func (p podIn) start(t *testing.T) {
	t.Helper()
	must(t, os.Mkdir(p.cgroup, 0o755))
	must(t, os.WriteFile(filepath.Join(p.cgroup, "io.max"), nil, 0o644))
}

// wantLimits fails the test unless the file io.max of the pod has the limits for the device of the volume.
func (p podIn) wantLimits(t *testing.T, l *testVolume, want string) {
	t.Helper()
	if want != "" {
		want = l.deviceNumber(t) + " " + want
	}
	p.wantContent(t, want)
}

// wantContent fails the test unless the file io.max of the pod has a content.
func (p podIn) wantContent(t *testing.T, want string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(p.cgroup, "io.max"))
	must(t, err)
	if got := strings.TrimSpace(string(b)); got != want {
		t.Errorf("io.max contains %q, want %q", got, want)
	}
}

// deviceNumber returns the number of the whole device of a staged volume, as io.max names it.
func (l *testVolume) deviceNumber(t *testing.T) string {
	t.Helper()
	device := l.target
	if !l.kind.Block() {
		at, err := mount.At(l.staging)
		must(t, err)
		device = at.Source
	}
	number, err := blockdev.WholeNumber(device)
	must(t, err)
	return fmt.Sprintf("%d:%d", unix.Major(number), unix.Minor(number))
}

// noLimits is what the driver writes to remove limits.
const noLimits = "rbps=max wbps=max riops=max wiops=max"

// testIOLimits: the limits of a volume apply to each pod that uses it, also after a change and a restart of the driver, and to
// no other pod. Volumes without a device of this node have no limits.
func testIOLimits(t *testing.T, d *Driver, kind Kind) {
	if !kind.Has(Device | NodeLocal) {
		l := newVolume(t, d, kind, multiWriter)
		wantCode(t, l.modify(t, "iopsRead", "max"), codes.InvalidArgument, l.id)
		req := kind.request(t)
		req.MutableParameters = map[string]string{"iopsRead": "max"}
		_, err := d.Control.CreateVolume(t.Context(), req)
		wantCode(t, err, codes.InvalidArgument)
		return
	}
	root, dir := newHierarchy(t), t.TempDir()
	d = kind.start(t, "64G", func(o *driver.Options) { o.Cgroups = cgroup.Hierarchy(root) })
	req := kind.request(t, "iopsRead", "50", "bytesPerSecondWrite", "1Mi")
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: gib}
	req.MutableParameters = map[string]string{"iopsRead": "100"}
	l, _ := newVolumeFor(t, d, kind, req)
	first, second := newPod(t, root, dir, kind), newPod(t, root, dir, kind)
	l.target = first.target // cleanUp unpublishes it
	must(t, l.stage(t.Context()))
	testRepeatedCreate(t, l, req)
	first.start(t)
	must(t, l.publish(t.Context()))
	first.wantLimits(t, l, "rbps=max wbps=1048576 riops=100 wiops=max")

	// The kubelet may create the cgroup of a pod after it has published the volume.
	published := make(chan error, 1)
	go func() { published <- l.publishAt(t.Context(), second.target, false) }()
	await(t, "the volume to be mounted", func() bool {
		mounted, err := mount.IsMountPoint(second.target)
		return mounted && err == nil
	})
	select {
	case err := <-published:
		t.Fatalf("the volume was published in a pod without a cgroup: %v", err)
	default:
	}
	second.start(t)
	must(t, <-published)
	second.wantLimits(t, l, "rbps=max wbps=1048576 riops=100 wiops=max")

	must(t, l.modify(t, "iopsRead", "max", "bytesPerSecondRead", "2097152"))
	for _, p := range []podIn{first, second} {
		p.wantLimits(t, l, "rbps=2097152 wbps=1048576 riops=max wiops=max")
	}
	l.wantLimit(t, "bytesPerSecondRead", "2Mi", true)
	l.wantLimit(t, "bytesPerSecondRead", "3Mi", false)
	d.Stop(t)
	must(t, os.Truncate(filepath.Join(first.cgroup, "io.max"), 0))
	d.start(t)
	await(t, "the limits to be restored", func() bool {
		b, err := os.ReadFile(filepath.Join(first.cgroup, "io.max"))
		return err == nil && strings.HasSuffix(string(b), "rbps=2097152 wbps=1048576 riops=max wiops=max")
	})
	testRefusedLimits(t, l, root)
	must(t, l.unpublishAt(t.Context(), second.target))
	testUndonePublish(t, l, newPod(t, root, dir, kind), second)
	must(t, l.publishAt(t.Context(), second.target, false))

	must(t, l.unpublishAt(t.Context(), second.target))
	second.wantLimits(t, l, noLimits)
	first.wantLimits(t, l, "rbps=2097152 wbps=1048576 riops=max wiops=max")
	must(t, l.modify(t, "bytesPerSecondRead", "max", "bytesPerSecondWrite", "max"))
	first.wantLimits(t, l, noLimits)
	number := l.deviceNumber(t)
	must(t, l.unpublishAt(t.Context(), l.target))
	must(t, os.RemoveAll(first.cgroup)) // as with the pod
	second.limitEarlier(t, number)
	must(t, l.unstage(t.Context()))
	second.wantContent(t, number+" "+noLimits)
}

// limitEarlier writes a limit for the device with a number into the cgroup of a pod that does not use the device, as if removing the
// limit had failed. It would apply to the next volume whose device has the number.
func (p podIn) limitEarlier(t *testing.T, number string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(p.cgroup, "io.max"), []byte(number+" rbps=65536 wbps=max riops=max wiops=max\n"), 0o644))
}

// testRepeatedCreate: a repeated call that creates a volume sets the limits of its class, and removes those of an earlier class.
func testRepeatedCreate(t *testing.T, l *testVolume, req *csi.CreateVolumeRequest) {
	t.Helper()
	unlimited := l.kind.request(t)
	unlimited.Name, unlimited.CapacityRange = req.GetName(), req.GetCapacityRange()
	for _, tc := range []struct {
		req   *csi.CreateVolumeRequest
		value string
	}{{unlimited, "max"}, {req, "100"}} {
		_, err := l.d.Control.CreateVolume(t.Context(), tc.req)
		must(t, err)
		l.wantLimit(t, "iopsRead", tc.value, true)
	}
}

// wantLimit fails the test unless a parameter of the volume has a value, or has another one if confirmed is false.
func (l *testVolume) wantLimit(t *testing.T, key, value string, confirmed bool) {
	t.Helper()
	resp, err := l.d.Control.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: l.id, VolumeCapabilities: []*csi.VolumeCapability{l.cap}, MutableParameters: map[string]string{key: value},
	})
	must(t, err)
	if (resp.GetConfirmed() != nil) != confirmed {
		t.Errorf("ValidateVolumeCapabilities with %s %s: got %v, want confirmed %t", key, value, resp, confirmed)
	}
}

// wantNoTarget fails the test unless no target path was left by a publish call that failed. A kubelet does not unpublish it.
func wantNoTarget(t *testing.T, target string) {
	t.Helper()
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after the call failed, the target path %s exists (%v), want none", target, err)
	}
}

// testUndonePublish: a volume is not published in a pod whose I/O cannot be limited. Only the cgroup of that pod matters.
func testUndonePublish(t *testing.T, l *testVolume, broken, healthy podIn) {
	t.Helper()
	ioMax := filepath.Join(broken.cgroup, "io.max")
	must(t, os.Mkdir(broken.cgroup, 0o755)) // without the controller io
	for _, readOnly := range []bool{false, true} {
		wantCode(t, l.publishAt(t.Context(), broken.target, readOnly), codes.FailedPrecondition, l.id, "subtree_control")
		wantNoTarget(t, broken.target)
	}
	must(t, os.WriteFile(ioMax, nil, 0o644))
	must(t, l.publishAt(t.Context(), broken.target, false))
	must(t, os.Remove(ioMax))
	must(t, l.publishAt(t.Context(), healthy.target, false))
	must(t, l.unpublishAt(t.Context(), healthy.target))
	must(t, l.unpublishAt(t.Context(), broken.target))
	must(t, os.Remove(broken.cgroup))
	if l.kind.Block() { // a read-only target has a device of its own
		must(t, l.publishAt(t.Context(), healthy.target, true))
		number, err := blockdev.WholeNumber(healthy.target)
		must(t, err)
		healthy.wantContent(t, fmt.Sprintf("%d:%d rbps=2097152 wbps=1048576 riops=max wiops=max", unix.Major(number), unix.Minor(number)))
		must(t, l.unpublishAt(t.Context(), healthy.target))
		healthy.wantContent(t, fmt.Sprintf("%d:%d %s", unix.Major(number), unix.Minor(number), noLimits))
	}
}

// testRefusedLimits: invalid limits, and limits that this node cannot enforce, are refused and change nothing.
func testRefusedLimits(t *testing.T, l *testVolume, root string) {
	t.Helper()
	for key, value := range map[string]string{"iopsRead": "9", "iopsWrite": "4294967295", "bytesPerSecondRead": "1Ki", "bytesPerSecondWrite": "fast", "iops": "100", "csi.trivet.dev/Namespace": "a"} {
		wantCode(t, l.modify(t, key, value), codes.InvalidArgument, "mutable parameter", key)
	}
	wantCode(t, l.modify(t), codes.InvalidArgument, "mutable_parameters")
	controllers := filepath.Join(root, "cgroup.controllers")
	must(t, os.Rename(controllers, controllers+".moved")) // as with cgroup v1
	defer func() { must(t, os.Rename(controllers+".moved", controllers)) }()
	wantCode(t, l.modify(t, "iopsRead", "100"), codes.InvalidArgument, "not a cgroup v2 hierarchy")
	wantCode(t, l.publish(t.Context()), codes.Unavailable, l.id, "not a cgroup v2 hierarchy", l.target) // it stays published
	fresh := filepath.Join(t.TempDir(), "pods", uuid.NewString(), "volumes/kubernetes.io~csi/pv/mount")
	must(t, os.MkdirAll(filepath.Dir(fresh), 0o755))
	wantCode(t, l.publishAt(t.Context(), fresh, false), codes.FailedPrecondition, l.id, "not a cgroup v2 hierarchy")
	wantNoTarget(t, fresh)
	req := l.kind.request(t, "iopsRead", "100")
	_, err := l.d.Control.CreateVolume(t.Context(), req)
	wantCode(t, err, codes.InvalidArgument, "not a cgroup v2 hierarchy")
}

// IOLimitsEnforced tests with the cgroup v2 hierarchy of this machine that the I/O of a pod has the limits of its volume, for
// all kinds of a target.
func IOLimitsEnforced(t *testing.T, target Target) {
	t.Helper()
	if target.Prepare != nil {
		target.Prepare(t, &target)
	}
	for _, kind := range target.Volumes() {
		t.Run(kind.Name(), func(t *testing.T) { testEnforced(t, kind.start(t, "64G", func(*driver.Options) {}), kind) })
	}
}

func testEnforced(t *testing.T, d *Driver, kind Kind) {
	t.Helper()
	p := newPod(t, cgroup.Root, t.TempDir(), kind)
	container := p.startContainer(t)
	req := kind.request(t)
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: gib}
	req.MutableParameters = map[string]string{"bytesPerSecondWrite": "4Mi"}
	l, _ := newVolumeFor(t, d, kind, req)
	l.target = p.target
	l.stageAndPublish(t)
	data := l.data(l.target)

	wantTime(t, "direct writes", 3*time.Second, container.dd(t, "if=/dev/zero", "of="+data, "bs=256k", "count=48", "oflag=direct", "conv=notrunc"))
	must(t, l.modify(t, "bytesPerSecondWrite", "8Mi", "bytesPerSecondRead", "8Mi"))
	if kind.Has(Filesystem) { // the kernel may account a page of a raw device to the cgroup that first wrote to the device
		wantTime(t, "buffered writes", 2*time.Second, container.dd(t, "if=/dev/zero", "of="+data, "bs=1M", "count=16", "conv=notrunc,fsync"))
	}
	wantTime(t, "direct reads", 2*time.Second, container.dd(t, "if="+data, "of=/dev/null", "bs=256k", "count=64", "iflag=direct"))
	must(t, l.modify(t, "bytesPerSecondWrite", "max", "bytesPerSecondRead", "max", "iopsRead", "100"))
	wantTime(t, "read requests", 3*time.Second, container.dd(t, "if="+data, "of=/dev/null", "bs=4k", "count=300", "iflag=direct"))
	outside := inCgroup("").dd(t, "if="+data, "of=/dev/null", "bs=4k", "count=300", "iflag=direct")
	must(t, l.modify(t, "iopsRead", "max"))
	for what, took := range map[string]time.Duration{
		"outside the pod": outside,
		"without limits":  container.dd(t, "if="+data, "of=/dev/null", "bs=4k", "count=300", "iflag=direct"),
	} {
		if took > 1500*time.Millisecond {
			t.Errorf("300 reads %s took %s, want at most half the time of the limit", what, took)
		}
	}
	must(t, l.modify(t, "iopsRead", "100"))
	must(t, l.unpublishAt(t.Context(), l.target))
	if b, err := os.ReadFile(filepath.Join(p.cgroup, "io.max")); err != nil || len(b) > 0 {
		t.Errorf("after unpublishing, io.max contains %q, %v; want nothing", b, err)
	}
	must(t, l.unstage(t.Context()))
}

// inCgroup is the directory of a cgroup in which processes run. If it is empty, they run in that of the test.
type inCgroup string

// startContainer creates the cgroup of the pod and one for a container, as a kubelet and a container runtime. They are removed
// when the test ends.
func (p podIn) startContainer(t *testing.T) inCgroup {
	t.Helper()
	container := filepath.Join(p.cgroup, "container")
	var parents []string
	for dir := filepath.Dir(container); len(dir) >= len(cgroup.Root); dir = filepath.Dir(dir) {
		parents = append(parents, dir)
	}
	must(t, os.MkdirAll(container, 0o755))
	t.Cleanup(func() {
		for _, dir := range []string{container, p.cgroup} {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		}
	})
	for _, dir := range slices.Backward(parents) {
		must(t, os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+io +memory"), 0))
	}
	return inCgroup(container)
}

// ddTime matches the time in the output of dd(1), without its start.
var ddTime = regexp.MustCompile(`copied, ([0-9.e-]+) s`)

// dd runs dd(1) and returns how long the I/O took.
func (c inCgroup) dd(t *testing.T, args ...string) time.Duration {
	t.Helper()
	script := `export LC_ALL=C; exec dd "$@"`
	if c != "" {
		script = "echo $$ >" + string(c) + "/cgroup.procs; " + script
	}
	output := testenv.Run(t, "bash", slices.Concat([]string{"-ec", script, "dd"}, args)...)
	m := ddTime.FindStringSubmatch(output)
	if m == nil {
		t.Fatalf("dd printed %q, want a time", output)
	}
	seconds, err := strconv.ParseFloat(m[1], 64)
	must(t, err)
	return time.Duration(seconds * float64(time.Second))
}

// wantTime fails the test unless I/O took at least the time that its limit requires, less a tenth. It may take half as long again,
// because encryption on a busy machine also takes time.
func wantTime(t *testing.T, what string, want, took time.Duration) {
	t.Helper()
	t.Logf("%s: %s, by the limit %s", what, took, want)
	if took < want*9/10 || took > want*3/2 {
		t.Errorf("%s took %s, want %s", what, took, want)
	}
}

// NoisyNeighbour measures the requests for a volume while a pod writes to another volume of the pool as fast as it can, without and
// with a limit, for all kinds of a target.
func NoisyNeighbour(t *testing.T, target Target) {
	t.Helper()
	for _, kind := range target.Volumes() {
		t.Run(kind.Name(), func(t *testing.T) { testNoisyNeighbour(t, kind.start(t, "64G", func(*driver.Options) {}), kind) })
	}
}

// testNoisyNeighbour: a limit of one volume makes the slow requests for another one at least twice as fast.
func testNoisyNeighbour(t *testing.T, d *Driver, kind Kind) {
	t.Helper()
	quiet := newVolume(t, d, kind, multiWriter)
	quiet.stageAndPublish(t)
	p := newPod(t, cgroup.Root, t.TempDir(), kind)
	container := p.startContainer(t)
	noisy := newVolume(t, d, kind, multiWriter)
	noisy.target = p.target
	noisy.stageAndPublish(t)

	alone := quiet.p99(t)
	container.load(t, noisy.data(noisy.target))
	await(t, "the neighbour to write", func() bool { return p.written(t, noisy) > 64*mib })
	disturbed, rate := p.p99Beside(t, quiet, noisy)
	must(t, noisy.modify(t, "bytesPerSecondWrite", "8Mi"))
	limited, limitedRate := p.p99Beside(t, quiet, noisy)

	t.Logf("99th percentile of requests of 4 KiB: without a neighbour %v; while it writes %.1f MiB/s %v; while it is limited to %.1f MiB/s %v",
		alone, rate, disturbed, limitedRate, limited)
	if limited.read > disturbed.read/2 || limited.write > disturbed.write/2 {
		t.Errorf("got %v with a limit of the neighbour and %v without, want at most half with the limit", limited, disturbed)
	}
}

// p99 is the 99th percentile of the durations of requests.
type p99 struct{ read, write time.Duration }

func (p p99) String() string { return fmt.Sprintf("read %s, synchronous write %s", p.read, p.write) }

// p99 measures requests of 4 KiB at random positions, without the cache.
func (l *testVolume) p99(t *testing.T) p99 {
	t.Helper()
	const requests, block, blocks = 500, 4096, 4096
	f, err := os.OpenFile(l.data(l.target), os.O_RDWR|os.O_CREATE|unix.O_DIRECT|unix.O_DSYNC, 0o600)
	must(t, err)
	defer f.Close()
	// O_DIRECT requires aligned memory (open(2)).
	memory, err := unix.Mmap(-1, 0, block*blocks, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	must(t, err)
	defer func() { must(t, unix.Munmap(memory)) }()
	_, err = f.WriteAt(memory, 0)
	must(t, err)
	var reads, writes measure.Durations
	for range requests {
		at := rand.Int64N(blocks) * block
		for _, request := range []struct {
			do   func([]byte, int64) (int, error)
			took *measure.Durations
		}{{f.ReadAt, &reads}, {f.WriteAt, &writes}} {
			start := time.Now()
			_, err := request.do(memory[:block], at)
			request.took.Add(time.Since(start))
			must(t, err)
		}
	}
	return p99{reads.At(99), writes.At(99)}
}

// load writes to a file or a device as fast as possible until the test ends.
func (c inCgroup) load(t *testing.T, data string) {
	t.Helper()
	const script = `echo $$ >"$1/cgroup.procs"
		for i in 1 2 3 4; do
			while dd if=/dev/zero of="$2" bs=1M count=512 oflag=direct conv=notrunc status=none; do :; done &
		done
		wait`
	cmd := exec.CommandContext(t.Context(), "bash", "-c", script, "load", string(c), data)
	must(t, cmd.Start())
	t.Cleanup(func() {
		must(t, os.WriteFile(filepath.Join(string(c), "cgroup.kill"), []byte("1"), 0))
		_ = cmd.Wait() // it was killed
		await(t, "the processes of the pod to end", func() bool {
			b, err := os.ReadFile(filepath.Join(string(c), "cgroup.procs"))
			return err == nil && len(b) == 0
		})
	})
}

// written returns how many bytes the pod has written to the device of a volume.
func (p podIn) written(t *testing.T, l *testVolume) int64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(p.cgroup, "io.stat"))
	must(t, err)
	m := regexp.MustCompile(`(?m)^` + l.deviceNumber(t) + ` .*\bwbytes=(\d+)`).FindSubmatch(b)
	if m == nil {
		return 0
	}
	n, err := strconv.ParseInt(string(m[1]), 10, 64)
	must(t, err)
	return n
}

// p99Beside is quiet.p99, and also returns how many MiB per second the pod writes to another volume meanwhile.
func (p podIn) p99Beside(t *testing.T, quiet, noisy *testVolume) (result p99, rate float64) {
	t.Helper()
	start, before := time.Now(), p.written(t, noisy)
	result = quiet.p99(t)
	return result, float64(p.written(t, noisy)-before) / float64(mib) / time.Since(start).Seconds()
}
