package environment

import (
	"strings"

	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// Expand replaces the variables of a subPathExpr, each of which must have a value: a path
// of which a part is missing is another one, at worst the whole volume.
func (v Variables) Expand(expression string) (string, error) {
	return expand(expression, func(name string) (string, error) {
		known, ok := v[name]
		switch {
		case !ok:
			return "", plugin.Invalidf("variable %q is not in the container's env or envFrom: add it", name)
		case known.err == nil && known.value == "":
			return "", plugin.Invalidf("variable %q is empty: give it a value", name)
		}
		return known.value, known.err
	})
}

// of is a variable with a value that may refer to others. What refers to none stays as it
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

// expand replaces $(NAME) by the value of the name, and $$ by $.
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
