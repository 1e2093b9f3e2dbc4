package main

import (
	"context"
	"fmt"
	"time"

	"github.com/trivet-csi/trivet/test/measure"
)

// restart contains the measurements of a restart of the controller's driver. The times begin with the start of the new
// process.
type restart struct {
	first     time.Duration // until a call to a node succeeds
	listed    time.Duration // until the volumes of all nodes can be listed
	resources resources     // after that
}

// measureRestart ends the controller's driver and starts it again.
func measureRestart(ctx context.Context, f *fleet) restart {
	measure.Must(f.controller.Stop())
	begin := time.Now()
	f.launchController()
	onLast := f.volumeOn(f.nodes[len(f.nodes)-1])
	measure.Must(f.controller.Await(ctx, onLast.node.name, reachPoll, startTimeout, func() bool { return getVolume(ctx, f.routed, onLast) == nil }))
	r := restart{first: time.Since(begin)}
	f.awaitComplete(ctx)
	r.listed = time.Since(begin)
	r.resources = resourcesOf(ctx, f.controller, f.web)
	return r
}

func (r restart) String() string {
	return fmt.Sprintf("### Restart\n\nA call to a node succeeded %s after the start of the controller's driver, and the volumes of all nodes could be listed after %s. Then its RSS was %s, and at most %s.\n",
		seconds(r.first), seconds(r.listed), mebibytes(r.resources.resident), mebibytes(r.resources.peak))
}
