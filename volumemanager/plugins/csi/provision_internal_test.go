package csi

import (
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// TestClassifyCreateError: uncertain means that this call may have created the volume. refused means that
// no call has created it. If an error is neither, only an earlier call may have created the volume.
func TestClassifyCreateError(t *testing.T) {
	for code, want := range map[codes.Code]struct{ uncertain, refused bool }{
		codes.InvalidArgument:   {false, true},
		codes.OutOfRange:        {false, true},
		codes.NotFound:          {false, true},
		codes.Unimplemented:     {false, true},
		codes.Internal:          {false, false},
		codes.Unknown:           {false, false},
		codes.AlreadyExists:     {false, false},
		codes.ResourceExhausted: {false, false},
		codes.Aborted:           {true, false},
		codes.DeadlineExceeded:  {true, false},
		codes.Unavailable:       {true, false},
	} {
		callErr := &CallError{Driver: "d", Call: "CreateVolume", Code: code}
		var err error = callErr
		if !callErr.final() {
			err = &plugins.UncertainError{Err: callErr}
		}
		err = classifyCreateError(err)
		if plugins.Uncertain(err) != want.uncertain || plugins.Refused(err) != want.refused {
			t.Errorf("%s: got uncertain %v and refused %v, want %+v", code, plugins.Uncertain(err), plugins.Refused(err), want)
		}
	}
}
