//go:build vm

package crash

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
)

var cuts = flag.Int("cuts", 1, "number of moments during each call at which the tests of power failures cut the power; 0 means all")

// TestGroupPower cuts the power in the life of logical volumes; see testPower.
func TestGroupPower(t *testing.T) { testPower(t, groupXFS[0], groupRaw[0]) }

// TestThinPower is TestGroupPower for volumes in a thin pool.
func TestThinPower(t *testing.T) { testPower(t, thinXFS[0], thinRaw[0]) }

// TestEncryptedGroupPower is TestGroupPower for encrypted volumes.
func TestEncryptedGroupPower(t *testing.T) { testPower(t, cryptGroupExt4[0], cryptGroupRaw[0]) }

// TestEncryptedThinPower is TestThinPower for encrypted volumes.
func TestEncryptedThinPower(t *testing.T) {
	testPower(t, cryptThinExt4[0], kind{targets.Volume("thin-encrypted", "block"), "tcrypt-raw"})
}

// TestEncryptedPower is TestGroupPower for encrypted images.
func TestEncryptedPower(t *testing.T) {
	testPower(t, kind{targets.Volume("images-encrypted", "xfs"), "crypt-xfs"}, encryptedRaw[0])
}

// testPower records the writes to a disk during the life of a volume of each kind. Then it gives the disk the content that
// it may have after a power failure, at several moments. Each time, a new driver must find the effects of all calls that
// have returned, and the data that was synced. The interrupted call must have had its whole effect or none, and nothing may
// be left behind.
func testPower(t *testing.T, kinds ...kind) {
	t.Helper()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", *seed)
	for i, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(*seed, uint64(i)))
			m := newPowerMachine(t, k)
			steps := stepsOf(k)
			scenes := m.record(t, steps)
			m.reset(t)
			entries := m.disk.end(t)
			for _, c := range chooseCuts(r, steps, entries) {
				expected, interrupted := scenes[c.step], steps[c.step]
				name := fmt.Sprintf("%s/%d", interrupted, c.entries)
				if c.returned {
					name += "-returned"
					expected, interrupted = scenes[c.step+1], step{}
				}
				ok := t.Run(name, func(t *testing.T) {
					m.disk.restore(t, entries[:c.entries])
					m.boot(t)
					m.verify(t, expected.clone(), interrupted, r.IntN(2) == 0)
					m.reset(t)
				})
				if !ok {
					t.FailNow() // the failed subtest has left its devices
				}
			}
		})
	}
}

// step is a call in the life of a volume, or of another one that is restored from its snapshot.
type step struct {
	restored bool
	call     call
}

func (s step) String() string {
	if s.restored {
		return "restored-" + string(s.call)
	}
	return string(s.call)
}

// empty is the step in which the driver empties the trash.
const empty call = "empty"

// stepsOf returns the life of a volume of a kind.
func stepsOf(k kind) []step {
	steps := func(restored bool, calls ...call) (steps []step) {
		for _, one := range calls {
			steps = append(steps, step{restored, one})
		}
		return steps
	}
	life := steps(false, before[expand]...)
	if k.Has(backendtest.Snapshots) {
		life = append(life, step{call: snapshot})
	}
	life = append(life, steps(false, expand, nodeExpand, unpublish, unstage, controllerUnpublish)...)
	if k.Has(backendtest.Snapshots) {
		life = append(life, steps(true, slices.Concat(before[remove], []call{remove})...)...)
		life = append(life, step{call: deleteSnapshot})
	}
	return append(life, steps(false, remove, empty)...)
}

// scene is the expected state of the volumes at a moment.
type scene struct {
	volume   *co
	restored *co   // nil before the snapshot exists
	capacity int64 // the recorded size of volume
}

func (s scene) clone() scene {
	volume := *s.volume
	s.volume = &volume
	if s.restored != nil {
		restored := *s.restored
		s.restored = &restored
	}
	return s
}

// of returns the orchestrator of the volume of a step.
func (s scene) of(one step) *co {
	if one.restored {
		return s.restored
	}
	return s.volume
}

// powerMachine is a machine whose pool is on a disk that loses its power.
type powerMachine struct {
	disk *loggedDisk
	kind kind
	dir  string // the mount point of the filesystem on the disk; empty if the disk has a volume group
	host *host
}

// powerGroup is the volume group on the disk.
const powerGroup = "vg-power"

// newPowerMachine starts a driver with a pool on a new disk.
func newPowerMachine(t *testing.T, k kind) *powerMachine {
	t.Helper()
	m := &powerMachine{disk: newLoggedDisk(t), kind: k}
	if !k.Has(backendtest.Logical) {
		m.dir = filepath.Join(t.TempDir(), "mnt")
		must(t, os.Mkdir(m.dir, 0o755))
		testenv.Mkfs(t, "xfs", loggedDevice)
		m.boot(t)
		t.Cleanup(func() { m.shutDown(t) })
		m.host = newHostWithPool(t, filepath.Join(m.dir, "pool"), crashing, "")
		return m
	}
	group := &lvm.Group{VolumeGroup: powerGroup}
	m.lvm(t, "vgcreate", "--yes", powerGroup, loggedDevice)
	t.Cleanup(func() { m.shutDown(t) })
	if k.Has(backendtest.Thin) {
		group.ThinPool = "pool0"
		m.lvm(t, "lvcreate", "--yes", "--type", "thin-pool", "--extents", "95%FREE", "--poolmetadatasize", "64m", "--name", group.ThinPool, powerGroup)
	}
	m.host = newHostWithGroup(t, k, group)
	if group.ThinPool != "" {
		m.host.explainLoss = noThinVolumes
	}
	return m
}

// noThinVolumes returns an error if the thin pool has a volume. Without one, blocks that are in use were lost by the kernel: it
// allocates a block when a write begins, and maps the block in a later transaction, when the write has ended.
func noThinVolumes() error {
	const pool, temporary = "vg--power-pool0-tpool", 1<<24 - dm.MaxTemporary
	for _, from := range []int{0, temporary} {
		for number := from; number < from+dm.MaxTemporary; number++ {
			message := fmt.Sprintf("delete %d", number)
			if err := exec.Command("dmsetup", "message", pool, "0", message).Run(); err == nil {
				return fmt.Errorf("the thin pool had a volume with the number %d, which no logical volume has", number)
			}
		}
	}
	return nil
}

// lvm runs lvm(8), which must not find the physical volume a second time on the disk below.
func (m *powerMachine) lvm(t *testing.T, command string, args ...string) {
	t.Helper()
	filter := fmt.Sprintf(`devices{global_filter=["a|^%s$|","r|.*|"]}`, loggedDevice)
	testenv.Run(t, "lvm", append([]string{command, "--config", filter}, args...)...)
}

// boot mounts the filesystem on the disk.
func (m *powerMachine) boot(t *testing.T) {
	t.Helper()
	if m.dir != "" {
		testenv.Run(t, "mount", loggedDevice, m.dir)
	}
}

// shutDown ends the use of the disk.
func (m *powerMachine) shutDown(t *testing.T) {
	t.Helper()
	if m.dir == "" {
		m.lvm(t, "vgchange", "-an", powerGroup)
		return
	}
	if err := syscall.Unmount(m.dir, 0); err != nil && !errors.Is(err, syscall.EINVAL) { // EINVAL: it is not mounted
		t.Error(err)
	}
}

// reset kills the driver, and removes everything that a reboot removes.
func (m *powerMachine) reset(t *testing.T) {
	t.Helper()
	m.host.kill()
	must(t, unmountAll(m.host.dir))
	for _, name := range mappedDevices(t, "crypt") {
		testenv.Run(t, "dmsetup", "remove", "--retry", name)
	}
	must(t, clearLeftovers(m.host.dir, m.host.pool))
	m.shutDown(t)
	must(t, os.RemoveAll(filepath.Dir(blockdev.NodePath("x"))))
	targets, err := filepath.Glob(m.host.path("*/pod/target"))
	must(t, err)
	for _, target := range targets {
		must(t, os.Remove(target))
	}
}

// record makes the calls of a life, and marks in the log when each has returned. It returns the states at the marks.
func (m *powerMachine) record(t *testing.T, steps []step) (scenes []scene) {
	t.Helper()
	c, err := newCO(m.host, "pvc-1", m.kind)
	must(t, err)
	now := scene{volume: c}
	for _, one := range steps {
		if one.restored && now.restored == nil {
			now.restored, err = c.restored(0, "pvc-2")
			must(t, err)
		}
		scenes = append(scenes, now.clone())
		m.disk.mark(t)
		if one.call == empty {
			must(t, m.host.awaitEmpty())
			continue
		}
		must(t, now.of(one).do(one.call))
		if now.capacity = 0; c.created {
			now.capacity, err = c.capacity()
			must(t, err)
		}
	}
	m.disk.mark(t)
	return append(scenes, now)
}

// cut is a moment at which the power fails.
type cut struct {
	entries  int  // the number of entries in the log that are on the disk
	step     int  // the number of the current step
	returned bool // the call of the step has returned, and the next one has not begun
}

// quiet are the calls that write little to the disk.
var quiet = []call{controllerPublish, publish, nodeExpand, unpublish, unstage, controllerUnpublish}

// chooseCuts chooses the moments at which the power fails: some during each step, at random, and its end. At half of the
// former, a part of the writes survives that no flush followed.
func chooseCuts(r *rand.Rand, steps []step, entries []logEntry) (chosen []cut) {
	moments := durableMoments(entries)
	for n, one := range steps {
		during := moments[n][1:]
		if *cuts > 0 {
			if slices.Contains(quiet, one.call) {
				continue
			}
			r.Shuffle(len(during), func(i, j int) { during[i], during[j] = during[j], during[i] })
			during = during[:min(*cuts, len(during))]
			slices.Sort(during)
		}
		for _, at := range during {
			if r.IntN(2) == 0 {
				at += r.IntN(unflushed(entries[at:]) + 1)
			}
			chosen = append(chosen, cut{at, n, false})
		}
		chosen = append(chosen, cut{moments[n+1][0], n, true})
	}
	return chosen
}

// durableMoments returns, for each mark, the numbers of entries that the log has at the mark, and later when writes have
// become durable.
func durableMoments(entries []logEntry) (moments [][]int) {
	for i, e := range entries[1:] { // the first is the mark of newLoggedDisk
		if e.mark {
			moments = append(moments, nil)
		}
		if n := len(moments) - 1; n >= 0 && (e.mark || e.durable) {
			moments[n] = append(moments[n], i+2)
		}
	}
	return moments
}

// unflushed returns the number of entries at the beginning of a part of the log that became durable by a later flush.
func unflushed(entries []logEntry) int {
	return slices.IndexFunc(entries, func(e logEntry) bool { return e.durable || e.mark })
}

// verify starts a driver after a power failure, and checks that the volumes are complete, can be used and deleted, and leave
// nothing. expected is the state before the interrupted step; the step has no call if none was interrupted. If retry is set,
// verify repeats the call.
func (m *powerMachine) verify(t *testing.T, expected scene, interrupted step, retry bool) {
	t.Helper()
	must(t, m.host.start(""))
	_, err := m.host.capacity() // which waits for the pool
	must(t, err)
	volumes := []*co{expected.volume}
	if expected.restored != nil {
		volumes = append(volumes, expected.restored)
	}
	for _, c := range volumes {
		one := interrupted.call
		if c != expected.of(interrupted) {
			one = ""
		}
		must(t, c.adopt(one))
	}
	switch c := expected.of(interrupted); interrupted.call {
	case write: // a part of the data may have been written
		must(t, c.do(controllerPublish, stage, publish, write))
	case create, expand, snapshot, deleteSnapshot, remove:
		if retry {
			must(t, c.do(interrupted.call))
		}
	default: // a reboot undoes what the call did on the node
	}
	if expected.volume.created {
		if capacity, err := expected.volume.capacity(); err != nil || capacity < expected.capacity {
			t.Fatalf("got a capacity of %d bytes and error %v after the power failure, want %d", capacity, err, expected.capacity)
		}
	}
	if r := expected.restored; r != nil && r.created {
		must(t, r.use())
	}
	expected.volume.finish(t)
	for _, name := range mappedDevices(t, "") {
		if strings.Contains(name, "trivet") {
			t.Errorf("the mapped device %s is left", name)
		}
	}
}

// adopt compares the volume and its snapshot with the expected state after a reboot. The interrupted call may have had its
// effect, which adopt adds to the expected state.
func (c *co) adopt(interrupted call) error {
	c.staged, c.published = false, false
	existing := func(path string) bool {
		_, err := os.Stat(filepath.Join(c.host.pool, path))
		return !errors.Is(err, fs.ErrNotExist)
	}
	exists := existing("volumes/" + c.name)
	if exists != c.created && interrupted != create && interrupted != remove {
		return fmt.Errorf("got volume %s exists: %t after the power failure, want %t", c.name, exists, c.created)
	}
	if exists && !c.created {
		if _, err := c.volumeID(); err != nil {
			return err
		}
		c.written = c.source != ""
	}
	c.created = exists
	if !exists && interrupted == remove {
		c.written, c.formatted, c.initialSize = false, false, 0
	}
	exists = existing("snapshots/" + c.snapshotFolder())
	if expected := len(c.snapshots) > 0; exists != expected && interrupted != snapshot && interrupted != deleteSnapshot {
		return fmt.Errorf("got a snapshot of %s exists: %t after the power failure, want %t", c.name, exists, expected)
	}
	c.snapshots = nil
	if exists {
		id, err := c.snapshotFolderID()
		c.snapshots = []string{id}
		return err
	}
	return nil
}
