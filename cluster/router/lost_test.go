package router_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/volume"
)

// TestCheckLost: a pool is lost only if its node does not exist, and all other nodes answer and do not have the pool.
func TestCheckLost(t *testing.T) {
	w := newCluster(t, "a", "b")
	id := w.mustCreateOn("a", "v")
	want := func(text string) {
		t.Helper()
		awaitError(t, text, func() error { return w.CheckLost(t.Context(), id, nil) })
	}
	want(`recorded for node "a", which exists`)
	w.drivers["a"].Stop(t)
	w.removeHosts("a")
	must(t, w.CheckLost(t.Context(), id, []string{"b"}))
	if err := w.CheckLost(t.Context(), id, []string{"b", "new"}); err == nil || !strings.Contains(err.Error(), `not known yet: "new"`) {
		t.Errorf("got error %v, want one that names the node that the router does not know", err)
	}
	w.start("c", w.closedPool("default", "closed"))
	w.updateHosts()
	want(`may be on node "c", where pool "default" is closed`)
	w.stopDriver("c")
	want(`may be on node "c", which does not answer`)
	w.removeHosts("c")
	must(t, w.CheckLost(t.Context(), id, nil))
	w.start("d", w.pool("default", "a", "1Gi"))
	w.updateHosts()
	want(`is on node "d"`)
	w.removeOwners()
	w.restart()
	w.removeHosts("d")
	want("is not recorded")
	if err := w.CheckLost(t.Context(), "any text", nil); err == nil {
		t.Error("got no error for a static volume")
	}
	w.removeHosts("b")
	want("not known yet: none is known")
}

// TestNodeLossRecorded: the volume context contains the parameter if the class sets it.
func TestNodeLossRecorded(t *testing.T) {
	w := newCluster(t, "a")
	for name, class := range map[string]map[string]string{
		"unset": nil, "kept": {volume.ParamOnNodeLoss: volume.NodeLossKeep}, "released": {volume.ParamOnNodeLoss: volume.NodeLossRelease},
	} {
		for range 2 { // also when the call is repeated
			v := w.mustCreate(name, func(req *csi.CreateVolumeRequest) { req.Parameters = class })
			if got := v.GetVolumeContext()[volume.ParamOnNodeLoss]; got != class[volume.ParamOnNodeLoss] {
				t.Errorf("%s: got %q in the volume context, want %q", name, got, class[volume.ParamOnNodeLoss])
			}
		}
	}
}

// TestNodeLossValidated: the volume context of CreateVolume is confirmed, although the record of the node lacks the parameter.
func TestNodeLossValidated(t *testing.T) {
	w := newCluster(t, "a")
	v := w.mustCreate("v", func(req *csi.CreateVolumeRequest) {
		req.Parameters = map[string]string{volume.ParamOnNodeLoss: volume.NodeLossRelease}
	})
	for value, confirmed := range map[string]bool{volume.NodeLossRelease: true, "other": false} {
		given := maps.Clone(v.GetVolumeContext())
		given[volume.ParamOnNodeLoss] = value
		resp, err := w.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: v.GetVolumeId(), VolumeContext: given, VolumeCapabilities: []*csi.VolumeCapability{capability()},
		})
		must(t, err)
		if got := resp.GetConfirmed(); (got != nil) != confirmed || (confirmed && !maps.Equal(got.GetVolumeContext(), given)) {
			t.Errorf("%s: got %v, want it confirmed with the same context: %t", value, resp, confirmed)
		}
	}
}
