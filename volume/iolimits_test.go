package volume_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestIOLimits: mutable parameters change the limits that they name, or are refused with the key, the value and the remedy.
func TestIOLimits(t *testing.T) {
	have := volume.IOLimits{ReadIOPS: 100, WriteBytes: 1 << 20}
	for name, tc := range map[string]struct {
		mutable map[string]string
		want    volume.IOLimits
		says    []string // in the error; nil if the parameters are valid
	}{
		"none":            {nil, have, nil},
		"all":             {map[string]string{"iopsRead": "10", "iopsWrite": "4294967294", "bytesPerSecondRead": "65536", "bytesPerSecondWrite": "2Gi"}, volume.IOLimits{ReadIOPS: 10, WriteIOPS: 4294967294, ReadBytes: 65536, WriteBytes: 2 << 30}, nil},
		"one removed":     {map[string]string{"iopsRead": "max"}, volume.IOLimits{WriteBytes: 1 << 20}, nil},
		"unknown":         {map[string]string{"iopsread": "10"}, have, []string{`"iopsread" is unknown`, "iopsRead, iopsWrite, bytesPerSecondRead, bytesPerSecondWrite", "did you mean iopsRead?"}},
		"namespace":       {map[string]string{volume.ParamNamespace: "a"}, have, []string{"is unknown"}},
		"too few":         {map[string]string{"iopsRead": "9"}, have, []string{`iopsRead="9": expected max, or a number from 10 to 4294967294`}},
		"too many":        {map[string]string{"iopsWrite": "4294967295"}, have, []string{`"4294967295"`}},
		"suffix of bytes": {map[string]string{"iopsWrite": "1Ki"}, have, []string{`"1Ki"`}},
		"too slow":        {map[string]string{"bytesPerSecondRead": "65535"}, have, []string{"expected max, or a number of bytes of at least 64 KiB"}},
		"negative":        {map[string]string{"bytesPerSecondWrite": "-1"}, have, []string{`"-1"`}},
		"empty":           {map[string]string{"bytesPerSecondWrite": ""}, have, []string{`bytesPerSecondWrite=""`}},
		"decimal unit":    {map[string]string{"bytesPerSecondWrite": "10M"}, have, []string{`"10M"`, "Ki, Mi, Gi or Ti"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := have.With(tc.mutable)
			if tc.says == nil {
				if err != nil || got != tc.want {
					t.Errorf("got %+v, %v; want %+v", got, err, tc.want)
				}
				return
			}
			if !errors.Is(err, volume.ErrInvalid) {
				t.Fatalf("got %v, want ErrInvalid", err)
			}
			for _, s := range tc.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("got %q, want %q in it", err, s)
				}
			}
		})
	}
}

// TestInitialIOLimits: parameters of a class without limits give a volume without a record of limits.
func TestInitialIOLimits(t *testing.T) {
	none := volume.Parameters{Values: map[string]string{"allocation": "thin"}}
	if got := none.IOLimits(); got != nil {
		t.Errorf("got limits %+v without parameters, want none", got)
	}
	some := volume.Parameters{Values: map[string]string{"iopsRead": "max", "bytesPerSecondWrite": "1Mi"}}
	if got := some.IOLimits(); got == nil || *got != (volume.IOLimits{WriteBytes: 1 << 20}) {
		t.Errorf("got limits %+v, want 1 MiB written per second", got)
	}
}
