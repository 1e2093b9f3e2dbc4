package dm

import (
	"testing"

	"github.com/trivet-csi/trivet/linux/sys"
)

// TestParseThinPool parses tables and states of the kernel.
func TestParseThinPool(t *testing.T) {
	const table, status = "253:0 253:1 128 0 0 ", "3 113/1024 8/32768 - rw discard_passdown queue_if_no_space - 256"
	metadata, data := Usage{113 * 4096, 4 << 20}, Usage{8 * 65536, 2 << 30}
	for name, tc := range map[string]struct {
		parameters, status string
		want               ThinPool
	}{
		"as LVM creates it": {table, status, ThinPool{Data: data, Metadata: metadata, Mode: ModeWritable, Transaction: 3, Zero: true}},
		"without zeroing":   {"253:0 253:1 128 0 1 skip_block_zeroing ", status, ThinPool{Data: data, Metadata: metadata, Mode: ModeWritable, Transaction: 3}},
		"errors when full": {
			"253:0 253:1 128 0 1 error_if_no_space ", "3 113/1024 8/32768 - out_of_data_space discard_passdown error_if_no_space - 256",
			ThinPool{Data: data, Metadata: metadata, Mode: ModeOutOfSpace, Transaction: 3, Zero: true, ErrorIfFull: true},
		},
		"read-only": {
			table, "3 113/1024 8/32768 - ro discard_passdown queue_if_no_space needs_check 256",
			ThinPool{Data: data, Metadata: metadata, Mode: ModeReadOnly, Transaction: 3, Zero: true, NeedsCheck: true},
		},
		"failed": {table, "Fail", ThinPool{Mode: ModeFailed, Zero: true}},
	} {
		got, err := parseThinPool(sys.MappedTarget{Type: "thin-pool", Parameters: tc.parameters, Status: tc.status})
		if err != nil || got != tc.want {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, tc.want)
		}
	}
	for name, bad := range map[string]sys.MappedTarget{
		"another target": {Type: "linear", Parameters: "253:0 0"},
		"no table":       {Type: "thin-pool", Status: status},
		"no transaction": {Type: "thin-pool", Parameters: table, Status: "x 113/1024 8/32768 - rw - 256"},
		"no numbers":     {Type: "thin-pool", Parameters: table, Status: "3 a/b c/d - rw - 256"},
	} {
		if got, err := parseThinPool(bad); err == nil {
			t.Errorf("%s: got %+v, want an error", name, got)
		}
	}
}

// FuzzParseNumbers: an output is refused, or contains only numbers that are not those of temporary volumes.
func FuzzParseNumbers(f *testing.F) {
	f.Add(`{"report":[{"lv":[{"lv_uuid":"a","thin_id":"1"}],"seg":[{"lv_uuid":"b","thin_id":"16777115"}]}]}`)
	f.Add(`{"report":[{"lv":[{"lv_uuid":"a","thin_id":"-1"},{"lv_uuid":"b","thin_id":"16777116"}]}]}`)
	f.Fuzz(func(t *testing.T, out string) {
		numbers, err := parseNumbers(out)
		for id, n := range numbers {
			if err != nil || n < 0 || n >= firstTemporary {
				t.Errorf("got number %d of %q, error %v", n, id, err)
			}
		}
	})
}
