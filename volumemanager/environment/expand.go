package environment

import (
	"strings"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Expand replaces the variables of a subPathExpr. Each must have a value: a path with an empty
// part is another path, at worst the whole volume.
func (v Variables) Expand(expression string) (string, error) {
	return expand(expression, func(name string) (string, error) {
		known, ok := v[name]
		switch {
		case !ok:
			return "", plugins.Invalidf("variable %q is not in the container's env or envFrom: add it", name)
		case known.err == nil && known.value == "":
			return "", plugins.Invalidf("variable %q is empty: give it a value", name)
		}
		return known.value, known.err
	})
}

// of returns the variable of a value that may refer to others. An unknown reference stays as it
// is.
func (v Variables) of(value string) variable {
	value, err := expand(value, func(name string) (string, error) {
		if known, ok := v[name]; ok {
			return known.value, known.err
		}
		return "$(" + name + ")", nil
	})
	return variable{value, err}
}

// expand replaces $(NAME) by the value of NAME, and $$ by $.
func expand(text string, value func(name string) (string, error)) (string, error) {
	var b strings.Builder
	for rest := text; rest != ""; {
		before, after, found := strings.Cut(rest, "$")
		b.WriteString(before)
		if !found {
			break
		}
		name, further, closed := strings.Cut(strings.TrimPrefix(after, "("), ")")
		switch {
		case strings.HasPrefix(after, "$"):
			b.WriteByte('$')
			rest = after[1:]
		case strings.HasPrefix(after, "(") && closed:
			replacement, err := value(name)
			if err != nil {
				return "", err
			}
			b.WriteString(replacement)
			rest = further
		default:
			b.WriteByte('$')
			rest = after
		}
	}
	return b.String(), nil
}
