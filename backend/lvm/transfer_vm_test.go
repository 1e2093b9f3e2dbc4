//go:build vm

package lvm_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

const mib = 1 << 20

// interruptedSize is the size of the volumes whose transfers are interrupted, in bytes.
const interruptedSize = 240 * mib

// nodes are two nodes, each with a volume group.
type nodes struct {
	*backendtest.Cluster
	groups []*lvm.Group
	// room is the capacity of each node before any volume was created.
	room []int64
}

// startNodes starts two nodes with thin pools.
func startNodes(t *testing.T, bytesPerSecond string) *nodes {
	t.Helper()
	return startNodesOn(t, bytesPerSecond, backendtest.OnThinPool, backendtest.OnThinPool)
}

// startNodesOn starts nodes on media, that send with a limited rate.
func startNodesOn(t *testing.T, bytesPerSecond string, media ...func(testing.TB, backendtest.Room) backendtest.Medium) *nodes {
	t.Helper()
	n := new(nodes)
	var configs []pool.Config
	for _, medium := range media {
		m := medium(t, backendtest.Room{})
		m.Config.Name = "default"
		configs = append(configs, m.Config)
		n.groups = append(n.groups, m.Config.Section.(*lvm.Group))
	}
	n.Cluster = backendtest.StartClusterOn(t, configs, func(o *driver.Options) { o.Config.TransferLimit.BytesPerSecond = bytesPerSecond }, lvm.Kind)
	for i := range n.groups {
		n.room = append(n.room, n.roomOf(t, i))
	}
	return n
}

// of returns the volumes of a kind on the nodes.
func (n *nodes) of(fsType, encryption string) *backendtest.Transfers {
	return &backendtest.Transfers{Cluster: n.Cluster, Capability: backendtest.CapabilityOf(fsType), Class: map[string]string{"encryption": encryption}}
}

func (n *nodes) roomOf(t *testing.T, node int) int64 {
	t.Helper()
	resp, err := n.Nodes[node].Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	must(t, err)
	return resp.GetAvailableCapacity()
}

// wantNothingLeft waits until no logical volume, device or reservation of a volume or snapshot is left.
func (n *nodes) wantNothingLeft(t *testing.T) {
	t.Helper()
	for i, g := range n.groups {
		backendtest.Eventually(t, func() error {
			if err := backendtest.CheckOnlyRecords(g); err != nil {
				return err
			}
			if room := n.roomOf(t, i); room != n.room[i] {
				return fmt.Errorf("node %d has room for %d bytes, want %d as before", i, room, n.room[i])
			}
			for _, dir := range []string{"received", "tmp", "trash"} {
				if left, _ := os.ReadDir(filepath.Join(n.records(i), ".trivet", dir)); len(left) > 0 {
					return fmt.Errorf("node %d: got %v in %s, want nothing", i, left, dir)
				}
			}
			return nil
		})
	}
}

// records is the directory with the records of a node.
func (n *nodes) records(node int) string {
	return filepath.Join(n.Nodes[node].Options.StateDir, "lvm", "default")
}

// isCopy reports whether a volume on the second node is marked as an unchanged copy of a volume of another node.
func (n *nodes) isCopy(v *backendtest.NodeVolume) bool {
	_, err := os.Stat(filepath.Join(n.records(1), "volumes", v.ID[strings.LastIndex(v.ID, ":")+1:], "received"))
	return err == nil
}

// active returns the logical volumes of a node that are active, beside those of the records and the thin pool.
func (n *nodes) active(t *testing.T, node int) (names []string) {
	t.Helper()
	for _, name := range strings.Fields(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", "lv_name", "-S", "lv_active=active", n.groups[node].VolumeGroup)) {
		if name != n.groups[node].ThinPool && !strings.HasPrefix(name, "trivet.records.") {
			names = append(names, name)
		}
	}
	return names
}

// TestTransfer: a volume that is restored on another node has the content of its source, and grows. An encrypted volume has
// the passphrase of its source. The source is a snapshot, or a volume that is in use or not.
func TestTransfer(t *testing.T) {
	n := startNodes(t, "")
	for _, encryption := range []string{"none", "luks2"} {
		for _, fsType := range []string{"ext4", "xfs", ""} {
			name := encryption + "-" + cmp.Or(fsType, "block")
			t.Run(name, func(t *testing.T) { testTransfer(t, n, n.of(fsType, encryption), name) })
		}
	}
	n.wantNothingLeft(t)
}

func testTransfer(t *testing.T, n *nodes, tr *backendtest.Transfers, name string) {
	const size, larger = 320 * mib, 800 * mib
	content := make([]byte, 20*mib)
	_, _ = rand.Read(content)
	source := tr.Create(t, 0, name, size, nil)
	source.Publish(t)
	source.Write(t, content, 0)
	want := func(restored *backendtest.NodeVolume, isCopy bool) {
		t.Helper()
		if got := n.isCopy(restored); got != isCopy {
			t.Errorf("the restored volume is marked as a copy: %t, want %t", got, isCopy)
		}
		restored.Publish(t)
		if n.isCopy(restored) {
			t.Error("the staged volume is marked as a copy")
		}
		if got := restored.Read(t, len(content)); !bytes.Equal(got, content) {
			t.Error("the restored volume differs from its source")
		}
		least := int64(larger) // a filesystem shows less than its device
		if tr.Capability.GetBlock() == nil {
			least = 2 * size
		}
		if got := restored.Size(t); got < least || got > larger {
			t.Errorf("the restored volume has %d bytes, want between %d and %d", got, least, larger)
		}
		restored.Unpublish(t)
		restored.Delete(t)
	}
	snapshot := tr.Snapshot(t, source, name)
	want(tr.Create(t, 1, name+"-restored", larger, snapshot), true)
	tr.DeleteSnapshot(t, snapshot)
	content[0]++
	source.Write(t, content[:4096], 0)
	want(tr.Create(t, 1, name+"-used", larger, source.Source()), false)
	source.Unpublish(t)
	want(tr.Create(t, 1, name+"-unused", larger, source.Source()), false)
	source.Delete(t)
	for i := range n.groups { // the header of a deleted volume is erased before its logical volume is removed
		backendtest.Eventually(t, func() error {
			if active := n.active(t, i); len(active) > 0 {
				return fmt.Errorf("node %d: got active logical volumes %q, want none", i, active)
			}
			return nil
		})
	}
}

// TestTransferInterrupted: a transfer of a snapshot continues after a restart of either driver, and erases what was not verified.
// DeleteVolume removes what was received. A deleted snapshot is received completely.
func TestTransferInterrupted(t *testing.T) {
	n := startNodes(t, "48Mi")
	tr := n.of("", "none")
	source, content, snapshot := n.cancelled(t, tr)

	for _, restarted := range []int{0, 1} {
		name := fmt.Sprintf("interrupted-%d", restarted)
		n.beginUnattended(t, tr, name, snapshot)
		n.Nodes[restarted].Stop(t)
		if restarted == 1 {
			n.makeStale(t, name, 200*mib) // after the last checksum before the end, with a part that is not sent
		}
		n.Nodes[restarted].Restart(t)
		v := n.complete(t, tr, name, snapshot)
		if !regexp.MustCompile(`"Sending to another node".* volume="` + name + `" from=[1-9]`).MatchString(backendtest.Log()) {
			t.Errorf("after the restart of node %d: the whole content was sent again", restarted)
		}
		v.Publish(t)
		if !bytes.Equal(v.Read(t, len(content)), content) {
			t.Errorf("after the restart of node %d: the volume differs from its source", restarted)
		}
		v.Unpublish(t)
		v.Delete(t)
	}

	deleted := n.begin(t.Context(), tr, "deleted", snapshot)
	n.awaitVerified(t, "deleted")
	tr.DeleteSnapshot(t, snapshot)
	must(t, <-deleted)
	v := n.complete(t, tr, "deleted", snapshot)
	v.Publish(t)
	if !bytes.Equal(v.Read(t, len(content)), content) {
		t.Error("the volume from a snapshot that was deleted differs from its source")
	}
	v.Unpublish(t)
	v.Delete(t)
	source.Delete(t)
	n.wantNothingLeft(t)
}

// cancelled creates a volume with a snapshot on the first node, and deletes a volume while it is created from the snapshot on the
// second node.
func (n *nodes) cancelled(t *testing.T, tr *backendtest.Transfers) (source *backendtest.NodeVolume, content []byte, snapshot *csi.VolumeContentSource) {
	t.Helper()
	source = tr.Create(t, 0, "v", interruptedSize, nil)
	source.Publish(t)
	content = make([]byte, interruptedSize)
	_, _ = rand.Read(content[:80*mib])
	_, _ = rand.Read(content[140*mib:][:80*mib])
	source.Write(t, content, 0)
	source.Unpublish(t)
	snapshot = tr.Snapshot(t, source, "s")

	n.beginUnattended(t, tr, "cancelled", snapshot)
	backendtest.Eventually(t, func() error { // the transfer runs until then
		_, err := n.Nodes[1].Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: n.idOn(t, source.ID, "cancelled")})
		return err
	})
	backendtest.Eventually(t, func() error { return backendtest.CheckOnlyRecords(n.groups[1]) })
	return source, content, snapshot
}

// makeStale writes to the logical volume of an incomplete volume on the second node, from an offset to the end.
func (n *nodes) makeStale(t *testing.T, name string, from int64) {
	t.Helper()
	lv := strings.TrimSpace(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", "lv_full_name", "-S", "lv_tags=trivet.volume."+name, n.groups[1].VolumeGroup))
	testenv.Run(t, "lvm", "lvchange", "-ay", "-K", lv)
	defer testenv.Run(t, "lvm", "lvchange", "-an", lv)
	f, err := os.OpenFile("/dev/"+lv, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	must(t, err)
	_, err = f.WriteAt(bytes.Repeat([]byte("stale..."), int(end-from)/8), from)
	must(t, errors.Join(err, f.Sync()))
}

// begin begins to create a volume on the second node.
func (n *nodes) begin(ctx context.Context, tr *backendtest.Transfers, name string, from *csi.VolumeContentSource) <-chan error {
	answered := make(chan error, 1)
	go func() {
		_, err := tr.Router.Control.CreateVolume(ctx, tr.Request(1, name, interruptedSize, from))
		answered <- err
	}()
	return answered
}

// beginUnattended begins to create a volume on the second node, and ends the call when a part is verified. The transfer continues.
func (n *nodes) beginUnattended(t *testing.T, tr *backendtest.Transfers, name string, from *csi.VolumeContentSource) {
	t.Helper()
	ctx, end := context.WithCancel(t.Context())
	defer end()
	answered := n.begin(ctx, tr, name, from)
	n.awaitVerified(t, name)
	end()
	if err := <-answered; err == nil {
		t.Errorf("the call for %s has created a volume before it was ended", name)
	}
}

// complete creates a volume on the second node, and repeats the call while a driver does not answer.
func (n *nodes) complete(t *testing.T, tr *backendtest.Transfers, name string, from *csi.VolumeContentSource) *backendtest.NodeVolume {
	t.Helper()
	backendtest.Eventually(t, func() error {
		_, err := tr.Router.Control.CreateVolume(t.Context(), tr.Request(1, name, interruptedSize, from))
		if code := status.Code(err); code != codes.Unavailable && code != codes.Aborted {
			must(t, err)
		}
		return err
	})
	return tr.Create(t, 1, name, interruptedSize, from)
}

// idOn returns the ID of a volume on the second node, which may not exist, from that of a volume on the first node.
func (n *nodes) idOn(t *testing.T, id, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(n.records(1), "pool.json"))
	must(t, err)
	var marker struct {
		UUID string `json:"uuid"`
	}
	must(t, json.Unmarshal(b, &marker))
	return id[:strings.LastIndex(id, ".")+1] + marker.UUID[:8] + ":" + name
}

// verified returns how many bytes of a volume were received and verified.
func (n *nodes) verified(name string) int64 {
	var progress struct {
		Verified int64 `json:"verifiedBytes"`
	}
	b, err := os.ReadFile(filepath.Join(n.records(1), ".trivet", "received", name, "progress.json"))
	if err != nil || json.Unmarshal(b, &progress) != nil {
		return 0
	}
	return progress.Verified
}

func (n *nodes) awaitVerified(t *testing.T, name string) {
	t.Helper()
	backendtest.Eventually(t, func() error {
		if n.verified(name) < 64*mib {
			return errors.New("64 MiB are not verified yet")
		}
		return nil
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
