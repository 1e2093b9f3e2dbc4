package driver_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volume"
)

// TestFrozenNames: the metrics of a node's driver with a pool of each kind, of the controller's driver, and of a driver
// that serves both, keep their names, types and labels. The names that PersistentVolumes and Node objects contain do not change.
func TestFrozenNames(t *testing.T) {
	testenv.RequireRoot(t)
	device, _, _ := testenv.Disk(t, 64*mib)
	c := backendtest.NewCluster(t)
	o := c.NodeOptions(t, "node-1.example", filepath.Join(t.TempDir(), "pool"), loop.Kind, disk.Kind)
	o.HTTPAddress = backendtest.FreeAddress(t)
	o.Config.Pools = append(o.Config.Pools, pool.Config{Name: "disks", Section: &disk.Disks{Match: []string{device}}})
	r := c.RouterOptions(t, []driver.ForwardingNode{{Name: o.NodeID, Address: o.Config.Forwarding.Listen}}, loop.Kind, disk.Kind)
	r.HTTPAddress = backendtest.FreeAddress(t)
	r.Config.Kubernetes = &driver.Kubernetes{NodeLossDelay: "10m"}
	c.Nodes = append(c.Nodes, backendtest.StartWith(t, o))
	c.Router = backendtest.StartWith(t, r)
	c.Await(t)
	v := create(t, c.Router, backendtest.Kind{FSType: "ext4"}, 16)
	frozen.List(t, "names", namesIn(t, c.Nodes[0], v))
	_, nodePage := get(t, o.HTTPAddress, "/metrics")
	_, controllerPage := get(t, r.HTTPAddress, "/metrics")
	if strings.Contains(nodePage+controllerPage, "trivet_pool_published_volumes") {
		t.Error("the pages contain trivet_pool_published_volumes, but nothing records the publications")
	}
	single := examining(t, options(t, loop.Kind))
	s := backendtest.StartWith(t, single)
	create(t, s, backendtest.Kind{FSType: "ext4"}, 16)
	must(t, os.Rename(s.Pool(), s.Pool()+".away"))
	awaitHealth(t, single, `reason="PoolUnavailable",severity="inaccessible"`)
	_, unhealthyPage := get(t, single.HTTPAddress, "/metrics")
	must(t, os.Rename(s.Pool()+".away", s.Pool()))
	awaitHealth(t, single)
	_, singlePage := get(t, single.HTTPAddress, "/metrics")
	frozen.List(t, "metrics", frozen.Metrics(nodePage, controllerPage, singlePage, unhealthyPage))
	_, err := c.Router.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	must(t, err)
}

// namesIn returns the names that Kubernetes stores for a node and for a volume.
func namesIn(t *testing.T, node *backendtest.Driver, v *csi.Volume) []string {
	t.Helper()
	info, err := node.Node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	must(t, err)
	all := []string{"driver " + driver.DefaultName, "publish_context " + translate.ReadOnlyKey, "taint " + kube.StartupTaint(driver.DefaultName), "annotation " + kube.NodeLostKey, "volume_context " + volume.ParamOnNodeLoss}
	for key := range v.GetVolumeContext() {
		all = append(all, "volume_context "+key)
	}
	for _, topology := range append(v.GetAccessibleTopology(), info.GetAccessibleTopology()) {
		for key := range topology.GetSegments() {
			all = append(all, "topology "+key)
		}
	}
	return all
}
