package export

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/relay"
)

// TestRows: the function of each row reads the request of its call, and every call about a
// volume, a snapshot or parameters has a row.
func TestRows(t *testing.T) {
	w := newWorld(t, defaultIntervals)
	for _, d := range append(relay.ControllerServices, &csi.Node_ServiceDesc) {
		methods := map[string]bool{}
		for _, m := range d.Methods {
			methods["/"+d.ServiceName+"/"+m.MethodName] = true
		}
		for _, m := range d.Streams {
			methods["/"+d.ServiceName+"/"+m.StreamName] = true
		}
		for method := range methods {
			req, err := relay.NewRequest(method)
			if err != nil {
				t.Fatal(err)
			}
			row, ok := rows[method]
			if _, ofVolume := req.(volumeCall); ofVolume && !ok {
				t.Errorf("%s has no row", method)
			}
			if _, worker, err := w.relay.route(row, req); worker != nil {
				t.Errorf("%s: an empty request is answered by %v, %v", method, worker.job.Pool.Name, err)
			}
		}
	}
}
