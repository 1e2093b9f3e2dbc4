package export

import (
	"errors"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// TestRows: no worker answers an empty request. Every call of the Node service for a volume has a row.
// Every call for a volume in an unknown nfs pool fails.
func TestRows(t *testing.T) {
	w := newDriver(t, defaultIntervals)
	for _, d := range append(relay.ControllerServices, &csi.Node_ServiceDesc) {
		var methods []string
		for _, m := range d.Methods {
			methods = append(methods, m.MethodName)
		}
		for _, m := range d.Streams {
			methods = append(methods, m.StreamName)
		}
		for _, name := range methods {
			method := "/" + d.ServiceName + "/" + name
			req, err := relay.NewRequest(method)
			if err != nil {
				t.Fatal(err)
			}
			row, ok := rows[method]
			if _, worker, err := w.relay.route(row, req); worker != nil {
				t.Errorf("%s: got worker %s, %v for an empty request, want none", method, worker.job.Pool.Name, err)
			}
			field := req.ProtoReflect().Descriptor().Fields().ByName("volume_id")
			if field == nil {
				continue
			}
			if d == &csi.Node_ServiceDesc && !ok {
				t.Errorf("%s has no row", method)
			}
			req.ProtoReflect().Set(field, protoreflect.ValueOfString("nfs:missing:v"))
			if _, _, err := w.relay.route(row, req); !errors.Is(err, volume.ErrUnavailable) {
				t.Errorf("%s for a volume in an unknown pool: got %v, want ErrUnavailable", method, err)
			}
		}
	}
}
