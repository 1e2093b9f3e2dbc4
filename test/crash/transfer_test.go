package crash

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/internal/treetest"
	"github.com/trivet-csi/trivet/volume"
)

// receivePoints are the points that a node reaches while it receives a volume from another node, or abandons what it has received.
var receivePoints = []crashpoint.Point{
	crashpoint.ReceiveSynced, crashpoint.ReceiveRecorded, crashpoint.ReceiveMoved, crashpoint.ReceiveAbandoned,
	crashpoint.CreateBuilt, crashpoint.CreateCommitted, crashpoint.CreateDone,
}

// directoryPoints are receivePoints for directories.
var directoryPoints = append([]crashpoint.Point{crashpoint.ReceiveMade}, receivePoints...)

// transferPool is the pool of a node.
type transferPool struct {
	// dir is the directory with images, or with volumes that are directories.
	dir         string
	directories bool
	// used means that volumes are in use while they are sent.
	used bool
	// group is set instead of dir if the pool is in a volume group, disk if it is a whole disk.
	group *lvm.Group
	disk  string
}

// config returns the pool in the configuration of a driver.
func (p transferPool) config() string {
	switch {
	case p.disk != "":
		return fmt.Sprintf("{name: default, disks: {match: [%q]}}", p.disk)
	case p.group != nil && p.group.ThinPool == "":
		return fmt.Sprintf("{name: default, lvm: {volumeGroup: %q}}", p.group.VolumeGroup)
	case p.group != nil:
		return fmt.Sprintf("{name: default, lvm: {volumeGroup: %q, thinPool: %q}}", p.group.VolumeGroup, p.group.ThinPool)
	}
	return fmt.Sprintf("{name: default, directory: {path: %q}, size: 1Gi}", p.dir)
}

// class returns the parameters of the StorageClass.
func (p transferPool) class() map[string]string {
	switch {
	case p.disk != "":
		return map[string]string{"backend": disk.Name}
	case p.group != nil:
		return map[string]string{"backend": lvm.Name}
	case p.directories:
		return map[string]string{"backend": "local"}
	}
	return nil
}

// capability is that of the volumes.
func (p transferPool) capability() *csi.VolumeCapability {
	if p.directories {
		mode := backendtest.CapabilityOf("").GetAccessMode().GetMode()
		return backendtest.Directories()[0].Capability(mode)
	}
	return backendtest.CapabilityOf("")
}

// withContent calls f with the path of the image or device of a volume that is not staged.
func (p transferPool) withContent(t *testing.T, name string, f func(path string)) {
	t.Helper()
	if p.disk != "" {
		partition := strings.TrimSpace(testenv.Run(t, "losetup", "--find", "--show", "--offset", "1MiB", "--sizelimit", "32MiB", p.disk))
		f(partition)
		testenv.Run(t, "losetup", "-d", partition)
		return
	}
	if p.group == nil {
		f(filepath.Join(p.dir, "volumes", name, "image"))
		return
	}
	var lv string
	must(t, poll(func(context.Context) error { // one that was abandoned exists until the driver has removed it
		found := strings.Fields(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", "lv_full_name", "-S", "lv_tags=trivet.volume."+name, p.group.VolumeGroup))
		if len(found) != 1 {
			return fmt.Errorf("got the logical volumes %q of volume %s, want one", found, name)
		}
		lv = found[0]
		return nil
	}))
	testenv.Run(t, "lvm", "lvchange", "-ay", "-K", lv)
	f("/dev/" + lv)
	testenv.Run(t, "lvm", "lvchange", "-an", lv)
}

// imagePools returns pools with images for two nodes.
func imagePools(t *testing.T) (a, b transferPool) {
	t.Helper()
	dir := testenv.Filesystem(t, "xfs", poolFilesystem)
	return transferPool{dir: filepath.Join(dir, "a")}, transferPool{dir: filepath.Join(dir, "b")}
}

// directoryPools returns pools with directories on two filesystems for two nodes.
func directoryPools(t *testing.T, fsType string) (a, b transferPool) {
	t.Helper()
	used := fsType == "btrfs"
	a = transferPool{dir: filepath.Join(testenv.Filesystem(t, fsType, poolFilesystem), "a"), directories: true, used: used}
	b = transferPool{dir: filepath.Join(testenv.Filesystem(t, fsType, poolFilesystem), "b"), directories: true}
	return a, b
}

// data is the directory of a volume in a pool with directories.
func (p transferPool) data(name string) string { return filepath.Join(p.dir, "volumes", name, "data") }

// diskPools returns pools of one disk for two nodes. That of the second has old data.
func diskPools(t *testing.T) (a, b transferPool) {
	t.Helper()
	const size = 34 << 20
	a.disk, _, _ = testenv.Disk(t, size)
	b.disk, _, _ = testenv.Disk(t, size)
	backendtest.FillOld(t, b.disk, size)
	return a, b
}

// member is the driver of a node, or of the controller, in its own process.
type member struct {
	dir     string
	pool    transferPool
	args    []string
	address string
	process *process
	control csi.ControllerClient
	node    csi.NodeClient
}

// newMember starts a driver. who is the identity in its certificate.
func newMember(t *testing.T, c *backendtest.Cluster, who *url.URL, usage x509.ExtKeyUsage, config string, args ...string) *member {
	t.Helper()
	m := &member{dir: newDir(t)}
	m.args = append([]string{
		"driver", "--endpoint", "unix://" + filepath.Join(m.dir, "csi.sock"), "--config", filepath.Join(m.dir, "config.yaml"),
		"--state-dir", filepath.Join(m.dir, "state"), "--http-address", "",
	}, args...)
	c.Certify(t, filepath.Join(m.dir, "state", "certificates"), who, usage)
	must(t, os.WriteFile(filepath.Join(m.dir, "config.yaml"), []byte(config), 0o600))
	conn, err := grpc.NewClient("unix://"+filepath.Join(m.dir, "csi.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(t, err)
	m.control, m.node = csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	t.Cleanup(func() {
		_ = conn.Close()
		if m.process == nil { // the test has ended before it started the driver
			return
		}
		_ = m.process.cmd.Process.Kill()
		<-m.process.dead
		// The records of logical volumes are mounted, and a command that the driver was starting may use them until it ends, too.
		if err := poll(func(context.Context) error { return clearLeftovers(m.dir, m.dir) }); err != nil {
			t.Errorf("removing the leftovers: %v", err)
		}
	})
	return m
}

// start starts the driver.
func (m *member) start(t *testing.T, armed crashpoint.Point) {
	t.Helper()
	cmd := exec.Command(crashing, m.args...)
	cmd.Env = append(os.Environ(), "TRIVET_CRASH_AT="+string(armed))
	must(t, cmd.Start())
	p := &process{cmd: cmd, dead: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // killed
		close(p.dead)
	}()
	m.process = p
}

// newNode returns the driver of a node with a pool.
func newNode(t *testing.T, c *backendtest.Cluster, name string, pool transferPool) *member {
	t.Helper()
	address := backendtest.FreeAddress(t)
	config := fmt.Sprintf("pools: [%s]\nforwarding: {listen: %q}\n", pool.config(), address)
	m := newMember(t, c, pki.NodeURI(backendtest.DriverName, name), x509.ExtKeyUsageServerAuth, config, "--services", "node", "--node-id", name)
	m.address, m.pool = address, pool
	return m
}

// records is the directory with the records of the node's pool.
func (m *member) records() string {
	switch {
	case m.pool.disk != "":
		return filepath.Join(m.dir, "state/disks/default")
	case m.pool.group != nil:
		return filepath.Join(m.dir, "state/lvm/default")
	}
	return m.pool.dir
}

// pointsTo returns the points at which a driver is killed one after the other to reach p in a transfer. An incomplete image
// or directory is abandoned if the content has changed since an earlier, interrupted call.
func pointsTo(p crashpoint.Point) []crashpoint.Point {
	if p == crashpoint.ReceiveAbandoned {
		return []crashpoint.Point{crashpoint.ReceiveRecorded, p}
	}
	return []crashpoint.Point{p}
}

// TestKilledInTransfer kills the receiving driver at each point, while it receives the whole content of a volume or the
// differences between two snapshots. Afterwards the volume is created, or the call is undone by DeleteVolume, and nothing is left.
func TestKilledInTransfer(t *testing.T) {
	t.Parallel()
	for i, p := range receivePoints {
		for name, undone := range map[string]bool{"retry": false, "undo": true} {
			for _, differences := range []bool{false, true} {
				if differences && p == crashpoint.ReceiveAbandoned { // the content of a snapshot does not change
					continue
				}
				if leftOut(3, i, undone, differences) {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/differences=%t", p, name, differences), func(t *testing.T) {
					t.Parallel()
					poolA, poolB := imagePools(t)
					killInTransfer(t, p, undone, differences, poolA, poolB)
				})
			}
		}
	}
}

// leftOut reports whether -short leaves out a combination of a crash point and other choices. It runs one of n, and at least one for each
// point if there are n-1 choices. i is the index of the point.
func leftOut(n, i int, choices ...bool) bool {
	for _, c := range choices {
		if c {
			i++
		}
	}
	return testing.Short() && i%n != 0
}

// TestDiskKilledInTransfer is TestKilledInTransfer for whole disks, which have no differences.
func TestDiskKilledInTransfer(t *testing.T) { killInTransferTo(t, diskPools) }

// killInTransferTo calls killInTransfer for new pools of two nodes, in which a retry never abandons what was received.
func killInTransferTo(t *testing.T, pools func(t *testing.T) (a, b transferPool)) {
	t.Helper()
	for i, p := range append([]crashpoint.Point{crashpoint.CreateImage}, receivePoints...) {
		if p == crashpoint.ReceiveAbandoned {
			continue
		}
		for _, undone := range []bool{false, true} {
			if leftOut(2, i, undone) {
				continue
			}
			t.Run(fmt.Sprintf("%s/undone=%t", p, undone), func(t *testing.T) {
				poolA, poolB := pools(t)
				killInTransfer(t, p, undone, false, poolA, poolB)
			})
		}
	}
	t.Run(string(crashpoint.ReceiveAbandoned), func(t *testing.T) {
		poolA, poolB := pools(t)
		killAbandoning(t, poolA, poolB)
	})
}

// killAbandoning kills the receiving driver in a transfer, and then in DeleteVolume of the volume. Afterwards nothing is left.
func killAbandoning(t *testing.T, poolA, poolB transferPool) {
	t.Helper()
	a, b, controller := newMembers(t, poolA, poolB)
	a.start(t, "")
	b.start(t, crashpoint.ReceiveRecorded)
	controller.start(t, "")
	id, err := controller.create(t, "v", "a", nil)
	must(t, err)
	poolA.use(t, a, id)
	from := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	untilKilled := func(call func(ctx context.Context) error) {
		t.Helper()
		must(t, poll(func(ctx context.Context) error {
			limited, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			err := call(limited)
			select {
			case <-b.process.dead:
				return nil
			default:
				return fmt.Errorf("the driver was not killed; the call has returned %w", err)
			}
		}))
	}
	untilKilled(func(ctx context.Context) error {
		_, err := controller.control.CreateVolume(ctx, controller.request("n", "b", from))
		return err
	})
	remove := func(ctx context.Context) error {
		_, err := controller.control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: b.idOf(t, id, "n")})
		return err
	}
	b.start(t, crashpoint.ReceiveAbandoned)
	untilKilled(remove)
	b.start(t, "")
	must(t, poll(remove))
	for _, left := range []string{"received", "tmp", "trash"} {
		must(t, poll(func(context.Context) error { return emptyDir(filepath.Join(b.records(), ".trivet", left)) }))
	}
	if poolB.group != nil {
		must(t, backendtest.CheckOnlyRecords(poolB.group))
	} else {
		must(t, wantBlank(poolB.disk))
	}
}

// idOf returns the ID of a volume on the node, which may not exist, from that of a volume on another node.
func (m *member) idOf(t *testing.T, other, name string) string {
	t.Helper()
	uuid, err := testenv.PoolUUID(m.records())
	must(t, err)
	id, err := volume.ParseID(other)
	must(t, err)
	id.PoolUUID, id.Name = uuid[:8], name
	return id.String()
}

// newMembers returns the drivers of two nodes and of the controller.
func newMembers(t *testing.T, poolA, poolB transferPool) (a, b, controller *member) {
	t.Helper()
	c := backendtest.NewCluster(t)
	a, b = newNode(t, c, "a", poolA), newNode(t, c, "b", poolB)
	config := fmt.Sprintf("forwarding: {nodes: [{name: a, address: %q}, {name: b, address: %q}]}\n", a.address, b.address)
	controller = newMember(t, c, pki.ControllerURI(backendtest.DriverName), x509.ExtKeyUsageClientAuth, config, "--services", "controller")
	controller.pool = poolB
	return a, b, controller
}

// TestDirectoryKilledInTransfer is TestKilledInTransfer for directories, which have no differences. A volume on btrfs is in use while
// it is sent.
func TestDirectoryKilledInTransfer(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"xfs", "btrfs"} {
		for i, p := range directoryPoints {
			for _, undone := range []bool{false, true} {
				for _, snapshot := range []bool{false, true} {
					if snapshot && p == crashpoint.ReceiveAbandoned { // the content of a snapshot does not change
						continue
					}
					if leftOut(4, i, undone, snapshot, fsType == "xfs") {
						continue
					}
					t.Run(fmt.Sprintf("%s/%s/undone=%t/snapshot=%t", fsType, p, undone, snapshot), func(t *testing.T) {
						t.Parallel()
						poolA, poolB := directoryPools(t, fsType)
						killInTransfer(t, p, undone, snapshot, poolA, poolB)
					})
				}
			}
		}
	}
}

func killInTransfer(t *testing.T, p crashpoint.Point, undone, differences bool, poolA, poolB transferPool) {
	t.Helper()
	a, b, controller := newMembers(t, poolA, poolB)
	a.start(t, "")
	points := pointsTo(p)
	b.start(t, map[bool]crashpoint.Point{false: points[0]}[differences])
	controller.start(t, "")

	id, err := controller.create(t, "v", "a", nil)
	must(t, err)
	content := make([]byte, 3<<20)
	_, _ = rand.Read(content)
	unstage := poolA.use(t, a, id)
	defer unstage()
	poolA.write(t, "v", content)
	from := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	if differences {
		_, err := controller.create(t, "base", "b", controller.snapshot(t, "s1", id))
		must(t, err)
		clear(content[1<<20 : 2<<20])
		content[0]++
		poolA.write(t, "v", content)
		from = controller.snapshot(t, "s2", id)
		must(t, b.process.cmd.Process.Kill())
		<-b.process.dead
		b.start(t, p)
	}

	answered := make(chan error, 1)
	go func() {
		_, err := controller.create(t, "n", "b", from)
		answered <- err
	}()
	for i, p := range points {
		if !b.process.ended() {
			t.Fatalf("the driver was not killed at %s", p)
		}
		b.start(t, append(points, "")[i+1])
	}
	must(t, <-answered)
	switch {
	case undone:
		unstage()
		must(t, poll(func(ctx context.Context) error {
			got, err := controller.control.ListVolumes(ctx, &csi.ListVolumesRequest{})
			for _, e := range got.GetEntries() {
				_, err = controller.control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: e.GetVolume().GetVolumeId()})
			}
			return err
		}))
		must(t, emptyDir(filepath.Join(b.records(), "volumes")))
	case poolB.directories:
		treetest.Compare(t, poolA.data("v"), poolB.data("n"))
	default:
		poolB.withContent(t, "n", func(path string) {
			got, err := os.ReadFile(path)
			must(t, err)
			if len(got) != 32<<20 || !bytes.Equal(got[1<<20:4<<20], content) || len(bytes.Trim(got[:1<<20], "\x00"))+len(bytes.Trim(got[4<<20:], "\x00")) > 0 {
				t.Errorf("got another content of %d bytes than that of the source", len(got))
			}
		})
	}
	for _, left := range []string{"received", "tmp", "trash"} {
		must(t, poll(func(context.Context) error { return emptyDir(filepath.Join(b.records(), ".trivet", left)) }))
	}
	if undone && poolB.group != nil {
		must(t, backendtest.CheckOnlyRecords(poolB.group))
	}
}

// use stages a volume on a disk, which is copied only if it was used. A volume that is in use while it is sent stays staged until
// unstage is called, which can be repeated.
func (p transferPool) use(t *testing.T, m *member, id string) (unstage func()) {
	t.Helper()
	if p.disk == "" && !p.used {
		return func() {}
	}
	staging := newDir(t)
	unstage = func() {
		_, err := m.node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		if err != nil {
			t.Error(err)
		}
	}
	_, err := m.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: p.capability()})
	must(t, err)
	if !p.used {
		unstage()
	}
	return unstage
}

// write writes to a volume that is not staged, 1 MiB after its beginning. A directory gets a new file with the first MiB of
// the content, which has no zeros that would become a hole, and before that a tree with all types of files.
func (p transferPool) write(t *testing.T, name string, content []byte) {
	t.Helper()
	if p.directories {
		dir := p.data(name)
		entries, err := os.ReadDir(dir)
		must(t, err)
		if len(entries) == 0 {
			treetest.Make(t, dir, 1)
		}
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("content-%d", len(entries))), content[:1<<20], 0o600))
		return
	}
	p.withContent(t, name, func(path string) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		must(t, err)
		defer f.Close()
		_, err = f.WriteAt(content, 1<<20)
		must(t, errors.Join(err, f.Sync()))
	})
}

// snapshot takes a snapshot of a volume, and returns it as the source of others.
func (m *member) snapshot(t *testing.T, name, id string) *csi.VolumeContentSource {
	t.Helper()
	s, err := m.control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: id})
	must(t, err)
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.GetSnapshot().GetSnapshotId()}}}
}

// request is the request of a volume on a node.
func (m *member) request(name, node string, from *csi.VolumeContentSource) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20}, VolumeContentSource: from, Parameters: m.pool.class(),
		AccessibilityRequirements: &csi.TopologyRequirement{Preferred: []*csi.Topology{translate.Topology(node)}},
		VolumeCapabilities:        []*csi.VolumeCapability{m.pool.capability()},
	}
}

// create creates a volume on a node, and repeats the call while a driver does not answer.
func (m *member) create(t *testing.T, name, node string, from *csi.VolumeContentSource) (id string, err error) {
	t.Helper()
	err = poll(func(ctx context.Context) error {
		limited, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		resp, err := m.control.CreateVolume(limited, m.request(name, node, from))
		id = resp.GetVolume().GetVolumeId()
		switch status.Code(err) {
		case codes.OK, codes.Unavailable, codes.Aborted, codes.DeadlineExceeded, codes.ResourceExhausted: // while the nodes start
			return err
		default:
			return finalError{err}
		}
	})
	return id, err
}
