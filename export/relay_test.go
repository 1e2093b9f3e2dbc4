package export

import (
	"errors"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// TestRows: no empty request is answered by a worker, every call of the Node service about a volume has
// a row, and every call of the Controller service about a volume reaches the volume's pool.
func TestRows(t *testing.T) {
	w := newWorld(t, defaultIntervals)
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
				t.Errorf("%s: an empty request is answered by %v, %v", method, worker.job.Pool.Name, err)
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
				t.Errorf("%s for a volume in a pool that is not here: %v", method, err)
			}
		}
	}
}
